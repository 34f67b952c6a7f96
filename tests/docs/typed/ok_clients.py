"""Nodes of every sort: urls, the user's own clients, and stores."""

from redis.asyncio import Redis, RedisCluster

from asynclock import Redlock, Store, blocking
from asynclock.stores.memory import MemoryStore

store: Store = MemoryStore()
of_clients = Redlock(
    Redis(host="a"), Redis(unix_socket_path="/run/b.sock", decode_responses=True), "unix:///run/c.sock"
)
of_a_store = Redlock(store)
ready_later = Redlock()
ready_later.configure("embedded:", prefix="app:")


def of_a_cluster(cluster: RedisCluster) -> Redlock:
    ready_later.configure(cluster)
    return Redlock(cluster)


def for_threads(client: Redis, cluster: RedisCluster) -> blocking.Redlock:
    blocking.Redlock(client, "redis://b", store)
    made = blocking.Redlock(cluster)
    made.configure(cluster)
    return made


async def main() -> None:
    async with Redlock("memory:") as redlock, redlock("order:42"):
        await redlock.release_all()
    await of_a_store.aclose()
