"""How a hold is acquired, renewed, passed on and released: decisions without I/O.

Everything here is synchronous and receives events. It reads the time, draws numbers, sets timers and sends ops through
`core.py` only. `runtime/` implements `core.py` for asyncio, and a simulation implements it without an event loop.
"""
