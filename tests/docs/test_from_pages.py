"""The pages about other lock libraries are true: their programs run beside the real libraries, on real servers."""

from __future__ import annotations

import gc
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from asynclock import Redlock
from tests.support.peers import PEERS
from tests.support.services.zookeeper import ZooKeeper

FOLDER = Path(__file__).parents[2] / "docs" / "from"
PROGRAMS = [
    pytest.param(page.stem, program, id=f"{page.stem}-{number}")
    for page in sorted(FOLDER.glob("*.md"))
    for number, program in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
]
LIBRARIES = sorted(page for page in FOLDER.glob("*.md") if page.name != "README.md")
PARTS = ["Traps", "What changes", "The rollout"]
INDEX = (FOLDER / "README.md").read_text("utf-8")


@pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")  # aioredlock
@pytest.mark.parametrize(("page", "program"), PROGRAMS)
async def test_a_program_of_a_page_runs(
    page: str,
    program: str,
    shared_urls: list[str],
    name: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unchanged but for the servers and the name of the lock; its assertions hold, and it gets the lock."""
    for module in re.findall(r"^from (\w+) import|^import (\w+)$", program, re.MULTILINE):
        pytest.importorskip("".join(module))
    url = shared_urls[0]
    if "zk1" in program:
        zookeeper: ZooKeeper = request.getfixturevalue("shared_zookeeper")
        program = program.replace("zk1:2181,zk2:2181,zk3:2181", zookeeper.address)
    program = program.replace(
        'get_coordinator("redis://localhost"', f'get_coordinator("{url.replace("unix", "redis")}"'
    )
    program = program.replace("redis://localhost", url).replace("order:42", name)
    assert program.endswith("\nasyncio.run(main())\n")
    world: dict[str, Any] = {"__name__": page}
    exec(compile(program.removesuffix("asyncio.run(main())\n"), page, "exec"), world)
    await world["main"]()
    world.clear()
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # the sockets that tooz and aioredis do not close would be reported by a later test
    assert "fencing token" in capsys.readouterr().out


async def test_an_extension_adds_nothing_to_what_is_left(shared_urls: list[str], name: str) -> None:
    """As the traps of redis-py's page say: there it is added."""
    async with AsyncRedis.from_url(shared_urls[0]) as client, Redlock(shared_urls[0], prefix="") as redlock:
        async with client.lock(name, timeout=600) as theirs:
            await theirs.extend(10)
            assert await client.pttl(name) > 600_000
        async with redlock(name, lease=30) as lease:
            await lease.extend(lease=10)
            assert 10 < lease.remaining <= 30


def test_a_lock_of_sherlock_without_an_expiry_holds_nothing(shared_urls: list[str], name: str) -> None:
    """As the traps of its page say."""
    sherlock = pytest.importorskip("sherlock")
    with Redis.from_url(shared_urls[0]) as client:
        assert sherlock.RedisLock(name, client=client, expire=None).acquire(blocking=False)
        assert sherlock.RedisLock(name, client=client, expire=30).acquire(blocking=False)


def test_the_name_of_a_lock_of_tooz() -> None:
    """The row of `get_lock` has the name that shares its key on Redis."""
    page = (FOLDER / "tooz.md").read_text("utf-8")
    found = re.search(r'`coordinator.get_lock\(b"x"\)` \| on Redis `redlock\("x(\w*)"\)`', page)
    assert found
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    assert f'redlock("order:42{found[1]}"' in program  # which test_a_program_of_a_page_runs tries


def test_the_pages_have_programs() -> None:
    """Each but Redisson's, whose client is for the JVM; a page that is written differently would pass."""
    assert {each.values[0] for each in PROGRAMS} == {page.stem for page in FOLDER.glob("*.md")} - {"redisson"}


def test_each_page_begins_with_the_key() -> None:
    """The default prefix is what a user must know first."""
    for page in LIBRARIES:
        first = page.read_text("utf-8").split("\n\n")[1]
        assert re.match(r"\*\*The (prefix|path|key) first\.\*\*", first), page


@pytest.mark.parametrize("page", LIBRARIES, ids=lambda page: page.stem)
def test_each_page_has_all_its_parts(page: Path) -> None:
    """A table of what is called how here; then the traps, what behaves differently, and how a fleet changes over, under
    the same headings in the same order. None is empty."""
    first, *sections = re.split(r"^## ", page.read_text("utf-8"), flags=re.MULTILINE)
    table = re.search(r"^\| [^|]+ \| asynclock \|\n\|---\|---\|\n((?:\|.*\|\n){5,})", first, re.MULTILINE)
    assert table, "no table of old and new"
    texts = dict(each.split("\n\n", 1) for each in sections)
    assert [each for each in texts if each in PARTS] == PARTS
    for heading in ("Traps", "What changes"):
        assert len(re.findall("^- ", texts[heading], re.MULTILINE)) >= 2, heading
    assert len(texts["The rollout"].split()) >= 20


def test_each_library_has_a_page() -> None:
    """Each page is in the table of the index, and a folder that moved would pass everything."""
    linked = re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\)", INDEX, re.MULTILINE)
    assert sorted(linked) == [page.name for page in LIBRARIES]
    assert len(linked) >= 10


def test_the_index_has_the_prefixes_that_the_tests_use() -> None:
    """In the row of each library: those of tests/stores/test_mixed_fleets.py, which runs both."""
    for peer, (_, _, prefix, pattern) in PEERS.items():
        (row,) = (line for line in INDEX.splitlines() if line.startswith(f"| [{peer.partition(',')[0]}]("))
        assert re.search(r"prefix=\"(.*)\"|Redlock\(url\)", row)[1] in (prefix, None), row  # type: ignore[index]
        assert "prefix=" in row or prefix == "lock:"
        assert row.endswith(f"| `{pattern.format('order:42')}` |")
