"""Runs the shipped Lua scripts, with the rules of a Redis server: what its numbers, nils, tables and errors become, and
when a script is refused half-way."""

from __future__ import annotations

from hashlib import sha1
from typing import TYPE_CHECKING, Any

from simulation.stack.resp import Error, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PRELUDE = b"""
local call
redis = {}
function redis.pcall(...) return call(...) end
function redis.call(...)
  local reply = call(...)
  if type(reply) == 'table' and reply.err then error(reply, 0) end
  return reply
end
function redis.error_reply(text) return {err = text} end
function redis.status_reply(text) return {ok = text} end
local sandbox = {redis = redis, string = string, table = table, math = math, tonumber = tonumber, tostring = tostring,
  type = type, pairs = pairs, ipairs = ipairs, unpack = unpack, pcall = pcall,
  error = error, next = next, select = select}
local function run(script, keys, arguments)
  sandbox.KEYS, sandbox.ARGV = keys, arguments
  local fine, reply = pcall(script)
  return fine, reply
end
local function compile(text)
  return setfenv(assert(loadstring(text, '@user_script')), sandbox)
end
local function setup(function_of_python) call = function_of_python end
return run, compile, setup
"""


class Scripts:
    """One interpreter of Lua for all servers; `run` carries one script out at one of them."""

    def __init__(self) -> None:
        import lupa.lua51 as lupa

        self._lua = lupa.LuaRuntime(encoding=None, unpack_returned_tuples=True, register_eval=False)
        self._type = lupa.lua_type
        self._run, self._compile, setup = self._lua.execute(_PRELUDE)
        self._known: dict[bytes, Any] = {}
        self._do: Callable[[Sequence[bytes]], Any] = lambda words: None
        setup(self._call)

    def sha(self, text: bytes) -> bytes:
        """Compiles it."""
        sha = sha1(text).hexdigest().encode()  # noqa: S324 - Redis identifies scripts by their SHA-1
        if sha not in self._known:
            self._known[sha] = self._compile(text)
        return sha

    def run(
        self, sha: bytes, keys: Sequence[bytes], arguments: Sequence[bytes], do: Callable[[Sequence[bytes]], Any]
    ) -> Any:
        """The reply of a script. `do` carries a command out. An error of the script itself raises: the scripts have
        none."""
        before, self._do = self._do, do
        try:
            fine, reply = self._run(self._known[sha], self._lua.table(*keys), self._lua.table(*arguments))
        finally:
            self._do = before
        if not fine:
            if self._type(reply) != "table":
                raise AssertionError(f"a script failed: {reply!r}")
            return Error(_text(reply[b"err"]))
        return self._reply(reply)

    def _call(self, *words: Any) -> Any:
        return self._for_lua(self._do([each if isinstance(each, bytes) else _number(each) for each in words]))

    def _for_lua(self, reply: Any) -> Any:
        if reply is None:
            return False
        if isinstance(reply, (bytes, int)):
            return reply
        if isinstance(reply, Status):
            return self._lua.table_from({b"ok": reply.encode()})
        if isinstance(reply, Error):
            return self._lua.table_from({b"err": reply.text.encode()})
        return self._lua.table(*[self._for_lua(each) for each in reply])

    def _reply(self, reply: Any) -> Any:
        if reply is None or reply is False:
            return None
        if reply is True:
            return 1
        if isinstance(reply, (int, float)):
            return int(reply)
        if isinstance(reply, bytes):
            return reply
        if (error := reply[b"err"]) is not None:
            return Error(_text(error))
        if (status := reply[b"ok"]) is not None:
            return Status(_text(status))
        found: list[Any] = []
        while (each := reply[len(found) + 1]) is not None:
            found.append(self._reply(each))
        return found


def _text(raw: Any) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)


def _number(number: Any) -> bytes:
    return b"%d" % number if number == int(number) else b"%.17g" % number


_shared: list[Scripts] = []


def scripts() -> Scripts:
    """The interpreter of this process."""
    if not _shared:
        _shared.append(Scripts())
    return _shared[0]
