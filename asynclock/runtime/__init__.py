"""The machine of `protocol/` in an event loop of asyncio: sessions, waiting, logging, closing, the renewal thread."""
