"""How a hold is acquired, renewed, passed on and released: decisions without I/O.

Everything here is synchronous, and is told events. It reads the time, draws numbers, sets timers and sends ops through
`core.py` only. `runtime/` does that for an event loop of asyncio, and a simulation does it without one.
"""
