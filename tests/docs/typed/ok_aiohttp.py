"""An application with aiohttp: the client that a handler finds is typed."""

from typing import assert_type

from aiohttp import web

from asynclock import Redlock, redlock
from asynclock.aiohttp import CLIENT, setup


async def charge(request: web.Request) -> web.Response:
    locks = assert_type(request.config_dict[CLIENT], Redlock)
    order_id = int(request.match_info["order_id"])
    async with locks(f"order:{order_id}", timeout=5) as lease:
        fence: int = lease.fence
        return web.json_response({"order": order_id, "fence": fence})


app = web.Application()
setup(app, redlock, busy_status=423, ready="/readyz")
app.router.add_post(r"/orders/{order_id:\d+}/charge", charge)
assert_type(app[CLIENT], Redlock)

setup(web.Application())
