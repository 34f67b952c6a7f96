"""A readiness probe."""

from asynclock import Health, NodeHealth, Redlock


def line(node: NodeHealth) -> str:
    speed = "-" if node.latency is None else f"{node.latency * 1000:.1f} ms"
    return f"{node.node} {'ok' if node.ok else node.error} {speed}"


async def ready(redlock: Redlock) -> tuple[int, str]:
    health: Health = await redlock.health()
    return (200 if health.ok else 503), "\n".join([health.reason, *map(line, health.nodes)])
