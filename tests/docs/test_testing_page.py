"""docs/testing.md: its tests pass as they stand, and the plugin works under each way to run them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
AUTO = [
    *("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function", "-o", "pythonpath=."),
    *("-p", "no:cacheprovider"),
]


def test_its_first_test_finds_a_charge_before_the_lock(pytester: pytest.Pytester) -> None:
    """The function of the page is one that the check can see into."""
    plugins, shop, first, *_ = SNIPPETS
    locked = """\
    async with locks(f"order:{order_id}"):
        await provider.charge(order_id)
"""
    assert shop.count(locked) == 1
    pytester.makeconftest(plugins)
    before = "    await provider.charge(order_id)\n    async with locks(f'order:{order_id}'):\n        pass\n"
    pytester.makepyfile(shop=shop.replace(locked, before), test_first=first)
    ran = pytester.runpytest_subprocess("-Werror", *AUTO)
    ran.assert_outcomes(failed=1)
    ran.stdout.fnmatch_lines(["*the calls do not exclude each other*"])


def test_its_tests_pass(pytester: pytest.Pytester, wheel: None) -> None:
    """Under pytest-asyncio in auto mode, in two workers of pytest-xdist, and with warnings as errors."""
    plugins, shop, *tests = SNIPPETS
    pytester.makeconftest(plugins)
    pytester.makepyfile(shop=shop, **{f"test_{number}": test for number, test in enumerate(tests)})
    found = sum(len(re.findall(r"^(?:async )?def test_", test, re.M)) for test in tests)
    assert found > 10
    ran = pytester.runpytest_subprocess("-n2", "-Werror", *AUTO)
    ran.assert_outcomes(passed=found)
