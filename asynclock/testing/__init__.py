"""For the tests of programs that use asynclock (docs/testing.md).

    from asynclock.testing import FakeStore, assert_exclusive, use

    async def test_nobody_pays_twice() -> None:
        with use(FakeStore()):
            await assert_exclusive(lambda: pay(42))

`FakeStore` keeps locks in memory by the same rules as a server, and a test moves its time. `use` gives it to the
clients of the program under test. The module `asynclock.testing.plugin` has fixtures for pytest.
"""

from asynclock.testing.exclusive import assert_exclusive
from asynclock.testing.store import FakeStore
from asynclock.testing.using import use

__all__ = ["FakeStore", "assert_exclusive", "use"]
