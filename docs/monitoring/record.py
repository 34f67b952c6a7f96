"""Records sample.json: the answers of a real Prometheus to the queries of dashboard.json, over four minutes of work on
five real servers. One server freezes for half a minute, an operator breaks a lock, and a majority freezes for 8 s.

    pip install 'asynclock[embedded,otel]' opentelemetry-sdk opentelemetry-exporter-prometheus
    python docs/monitoring/record.py /path/to/prometheus
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import start_http_server

from asynclock import LockError, Redlock
from asynclock.otel import instrument
from asynclock.stores.embedded import server as embedded

HERE = Path(__file__).parent
LENGTH, STEP, SETTLE = 240, 4, 15  # seconds: of the record, between two values, before it begins
CONFIG = """
global: {scrape_interval: 1s}
scrape_configs: [{job_name: shop, static_configs: [{targets: ["127.0.0.1:%d"]}]}]
"""


def free_port() -> int:
    """A port on which no server listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def work(redlock: Redlock, load: asyncio.Event) -> None:
    """One task of the shop."""
    while True:
        order = random.randrange(40 if load.is_set() else 400)  # noqa: S311 - a load, no secret
        with contextlib.suppress(LockError):
            async with redlock(f"order:{order}", label="order:{id}", timeout=3):
                await asyncio.sleep(random.lognormvariate(-4, 1))
        with contextlib.suppress(LockError):
            async with redlock.semaphore("reports", 4, label="reports", timeout=5):
                await asyncio.sleep(random.lognormvariate(-3, 0.5))
        with contextlib.suppress(LockError):
            if lease := await redlock(f"stock:{order % 20}", label="stock:{sku}").acquire(timeout=0.05):
                async with lease:
                    await asyncio.sleep(0.05)
        await asyncio.sleep(random.expovariate(5))


async def long_job(redlock: Redlock) -> None:
    """It holds its lock until it is lost, and begins again."""
    while True:
        with contextlib.suppress(LockError):
            async with redlock("nightly", label="nightly"):
                await asyncio.sleep(3600)
        await asyncio.sleep(1)


async def shop(servers: list[subprocess.Popen[bytes]], urls: list[str]) -> None:
    """All that happens."""
    load = asyncio.Event()
    clients = [Redlock(*urls, lease=4.0, patience=2.0) for _ in range(2)]
    for client in clients:
        instrument(client)
    tasks = [asyncio.create_task(work(client, load)) for client in clients for _ in range(12)]
    tasks.append(asyncio.create_task(long_job(clients[0])))
    await asyncio.sleep(SETTLE + 60)
    servers[2].send_signal(signal.SIGSTOP)
    await asyncio.sleep(30)
    servers[2].send_signal(signal.SIGCONT)
    await asyncio.sleep(15)
    load.set()
    await asyncio.sleep(30)
    await clients[1].break_lock("nightly")
    await asyncio.sleep(15)
    load.clear()
    await asyncio.sleep(20)
    for server in servers[:3]:
        server.send_signal(signal.SIGSTOP)
    await asyncio.sleep(8)
    for server in servers[:3]:
        server.send_signal(signal.SIGCONT)
    await asyncio.sleep(LENGTH - 178)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for client in clients:
        await client.aclose()


def answers(port: int, query: str, begin: float) -> list[dict[str, Any]]:
    """The series of one query: for each its labels, and its values by the seconds since `begin`."""
    query = query.replace("$__rate_interval", "10s").replace("$label", ".*")
    asked = urllib.parse.urlencode({"query": query, "start": begin, "end": begin + LENGTH, "step": STEP})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query_range?{asked}") as reply:
        found = json.load(reply)["data"]["result"]
    return [
        {
            "labels": each["metric"],
            "values": [[round(at - begin), float(f"{float(v):.4g}")] for at, v in each["values"] if v != "NaN"],
        }
        for each in found
    ]


def record(port: int, begin: float) -> dict[str, Any]:
    """The values of all panels."""
    dashboard = json.loads((HERE / "dashboard.json").read_text("utf-8"))
    panels: dict[str, list[Any]] = {}
    for panel in dashboard["panels"]:
        series = panels[panel["title"]] = []
        for target in panel["targets"]:
            for each in answers(port, target["expr"], begin):
                legend = target["legendFormat"]
                for label, value in each["labels"].items():
                    legend = legend.replace("{{" + label + "}}", value)
                values = each["values"][-1:] if panel["type"] == "stat" else each["values"]
                series.append({"legend": legend, "values": values})
    about = (
        "A real run: 24 tasks on five servers. Minute 1: a server freezes for 30 s. Minute 2: more load on fewer "
        "names, and an operator breaks a lock. Minute 3: a majority freezes for 8 s."
    )
    return {"about": about, "length": LENGTH, "panels": panels}


def main(prometheus: str) -> None:
    """Record, and write the file."""
    port, exporter = free_port(), free_port()
    ports = [free_port() for _ in range(5)]
    with tempfile.TemporaryDirectory(prefix="asynclock-record-") as name:
        folder = Path(name)
        (folder / "prometheus.yml").write_text(CONFIG % exporter)
        servers = [
            embedded.start(folder / f"s{each}.sock", "--port", str(each), "--bind", "127.0.0.1") for each in ports
        ]
        for each, server in zip(ports, servers, strict=True):
            embedded.wait_ready(folder / f"s{each}.sock", server)
        options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        options.append(f"--web.listen-address=127.0.0.1:{port}")
        watcher = subprocess.Popen([prometheus, *options])  # noqa: S603 - the user's own program
        try:
            provider = MeterProvider(metric_readers=[PrometheusMetricReader()])
            metrics.set_meter_provider(provider)
            start_http_server(exporter, "127.0.0.1")
            begin = time.time() + SETTLE
            asyncio.run(shop(servers, [f"redis://127.0.0.1:{each}" for each in ports]))
            (HERE / "sample.json").write_text(json.dumps(record(port, begin)) + "\n", "utf-8")
        finally:
            watcher.terminate()
            watcher.wait()
            embedded.stop(servers)


if __name__ == "__main__":
    main(sys.argv[1])
