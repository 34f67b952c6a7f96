"""The README and docs/ are true: every Python snippet in them runs, and every name in them exists."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import asynclock
from asynclock import Redlock
from asynclock._options import ClientSettings, LockSettings
from tests.support.programs import run_python
from tests.support.servers import Server
from tests.support.waiters import LATE, LIMIT

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "stores").glob("*.md"))]
# Their links lead somewhere, too. test_from_pages.py runs the snippets of docs/from/; the others have none.
OTHERS = [
    *sorted((ROOT / "docs" / "from").glob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "spec" / "README.md",
]


def snippets_of(page: Path) -> list[str]:
    """Its Python."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


SNIPPETS = [
    pytest.param(snippet, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, snippet in enumerate(snippets_of(page))
]


def shown_in(snippet: str, redlock: Redlock, **helpers: object) -> list[Callable[..., Any]]:
    """The coroutine functions that it shows, with this client, and these functions of its program."""
    world: dict[str, Any] = {"redlock": redlock, **vars(asynclock), **helpers}
    exec(compile(snippet, "snippet", "exec"), world)
    world["redlock"] = redlock
    shown = [each for each in world.values() if inspect.iscoroutinefunction(each) and each.__module__ is not None]
    return [each for each in shown if each.__code__.co_filename == "snippet"]


@pytest.mark.parametrize(
    "snippet",  # test_zookeeper_page.py runs those that need a server, and test_testing_page.py those that are tests
    [
        each
        for each in SNIPPETS
        if "asyncio.run(" in each.values[0] and not re.search("zookeeper://|^def test_", each.values[0], re.MULTILINE)
    ],
)
def test_a_program_in_the_docs_runs(snippet: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """It runs unchanged, in a fresh interpreter, without a warning."""
    if "embedded:" in snippet:
        request.getfixturevalue("wheel")
    assert "fencing token" in run_python(snippet, ASYNCLOCK_EMBEDDED_DIR=str(tmp_path))


@pytest.mark.parametrize(
    "snippet",  # those that need a server, a framework or a program of their own run in the test of their page
    [
        each
        for each in SNIPPETS
        if not re.search(
            r"asyncio\.run\(|async def test_|pytest_plugins|# shop\.py|FastAPI|web\.Application|Order\.objects"
            r"|uvicorn_worker|lifespan|Quart\(|asynclock\.blocking|httpx\.AsyncClient",
            each.values[0],
        )
    ],
)
async def test_a_snippet_in_the_docs_runs(snippet: str, redlock: Redlock, name: str) -> None:
    """Each coroutine function that it shows is called, with a real client, and calls the function that it guards."""
    called: list[str] = []

    async def no(*args: object) -> bool:
        return False

    def guarded(what: str) -> Any:
        async def work(*args: object, **kwargs: object) -> None:
            called.append(what)

        return work

    helpers = ("charge", "do", "hours_of_work", "post", "serve", "transfer", "write_report")
    mine = shown_in(snippet, redlock, is_charged=no, is_done=no, **{each: guarded(each) for each in helpers})
    for function in mine:
        before = len(called)
        await function(*[f"{name}:{each}" for each in inspect.signature(function).parameters])
        assert len(called) == before + 1
    assert mine or re.search(r"Redlock\(|asynclock\.stores", snippet)


@pytest.mark.parametrize("page", ["README.md", "docs/mutex.md"])
async def test_a_handler_of_the_docs_charges_an_order_once(page: str, redlock: Redlock, name: str) -> None:
    """One that was charged before it had the lock is not charged again."""
    (snippet,) = (each for each in snippets_of(ROOT / page) if "def charge_order" in each)
    charged: list[str] = []

    async def is_charged(order: str) -> bool:
        return order in charged

    async def charge(order: str, *, fence: int) -> None:
        charged.append(order)

    (charge_order,) = shown_in(snippet, redlock, charge=charge, is_charged=is_charged)
    for _ in range(2):
        await charge_order(name)
    assert charged == [name]


async def test_the_worker_of_the_readme_drops_no_job(redlock: Redlock, name: str) -> None:
    """One that another worker does is put back, since that worker may die."""
    (snippet,) = (each for each in snippets_of(ROOT / "README.md") if "async def work(" in each)
    done: list[str] = []

    async def do(job: str) -> None:
        done.append(f"does {job}")

    async def put_back(job: str) -> None:
        done.append(f"puts {job} back")

    async def is_done(job: str) -> bool:
        return False

    (work,) = shown_in(snippet.replace("timeout=2.0", "timeout=0"), redlock, do=do, put_back=put_back, is_done=is_done)
    async with redlock(f"job:{name}"):
        await asyncio.create_task(work(name))
    await work(name)
    assert done == [f"puts {name} back", f"does {name}"]


async def test_the_job_of_the_readme_that_loses_its_lock_fails(redlock: Redlock) -> None:
    """Its caller takes it for one that is not done."""
    (snippet,) = (each for each in snippets_of(ROOT / "README.md") if "async def nightly(" in each)

    async def hours_of_work() -> None:
        raise asynclock.LockLost("nightly", reason="expired")

    (nightly,) = shown_in(snippet, redlock, hours_of_work=hours_of_work)
    with pytest.raises(asynclock.LockLost):
        await nightly()


async def test_the_readiness_probe_of_the_docs(server: Server) -> None:
    """It runs as it stands: ready while a lock can be acquired, and not while the server only answers PING."""
    (snippet,) = (each.values[0] for each in SNIPPETS if '"/ready"' in str(each.values[0]))
    world: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(str(snippet), "snippet", "exec"), world)
    world["redlock"] = Redlock(server.url)
    transport = httpx.ASGITransport(app=world["app"])
    async with world["lifespan"](world["app"]), httpx.AsyncClient(transport=transport, base_url="http://app") as http:
        for memory, status, reason in ((0, 200, ""), (1, 503, "OOM"), (0, 200, "")):
            with server.cli() as cli:
                cli.config_set("maxmemory", memory)
                assert cli.ping()
            async with asyncio.timeout(LIMIT):
                while LATE.search((answer := await http.get("/ready")).text):
                    await asyncio.sleep(0.01)
            assert answer.status_code == status
            assert reason in answer.json()["reason"]
            assert (reason == "") is (answer.json()["reason"] == "")
            assert answer.json()["nodes"].keys() == {server.url}


@pytest.mark.parametrize("kind", ["mutex", "rwlock", "semaphore", "multi"])
def test_a_kinds_page_links_to_its_script(kind: str) -> None:
    """It explains the kind, and links to the script for the rule; the script exists."""
    page = (ROOT / "docs" / f"{kind}.md").read_text()
    link = f"../asynclock/stores/redis/scripts/{kind}.lua"
    assert f"({link})" in page
    assert (ROOT / "docs" / link).exists()
    assert "```lua" not in page
    headings = re.findall(r"^## (.*)", page, re.MULTILINE)
    assert headings == ["Promise", "Picture", "Failure", "When not to use it", "Its rule"]


def test_the_index_names_every_page() -> None:
    """docs/README.md says which page answers which question."""
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs")
        assert page.name == "README.md" or f"({path}" in index


def test_every_link_in_the_docs_leads_somewhere() -> None:
    """To a file of this repository; and to a heading of it, where it names one."""
    for page in [*PAGES, *OTHERS]:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            path, _, heading = link.partition("#")
            target = page.parent / path if path else page
            assert link.startswith("https://") or target.exists(), f"{page.name}: {link}"
            if heading and not link.startswith("https://"):
                assert heading in _anchors(target.read_text()), f"{page.name}: {link}"


PLACE = "https://github.com/asynclock/asynclock/"
RAW = "https://raw.githubusercontent.com/asynclock/asynclock/main/"


def test_the_links_of_the_readme_are_absolute() -> None:
    """The package index shows it, too, where a relative link leads nowhere. Each link into the repository leads to a
    file, and each reference has a definition."""
    text = (ROOT / "README.md").read_text()
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == []
    defined = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))
    assert {*re.findall(r"\]\[([^\]]+)\]", text)} == defined.keys()
    for url in defined.values():
        path = re.sub(rf"^(?:{RAW}|{PLACE}(?:blob|tree)/main/)", "", url)
        path, _, heading = path.partition("#")
        assert (ROOT / path).exists(), url
        assert not heading or heading in _anchors((ROOT / path).read_text()), url


def _anchors(text: str) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_the_readme_names_every_option() -> None:
    """With its default; and every error."""
    text = (ROOT / "README.md").read_text()
    for settings in (LockSettings(), ClientSettings()):
        for option in settings.__slots__:
            assert option == "lock" or f"`{option}`" in text
    for error in ("QuorumUnavailable", "LockLost", "LockNotHeld", "LockTimeout", "SelfDeadlock", "ConfigError"):
        assert f"`{error}`" in text
    assert f"| `lease` | {LockSettings().lease:g} |" in text
