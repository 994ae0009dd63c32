"""Several processes as torchrun would start them, without the seconds that loading torch takes."""

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import types
import uuid
from dataclasses import dataclass
from pathlib import Path

import tiny_classifier  # noqa: F401 - the processes know it too, as they load this module
import tiny_gpt  # noqa: F401 - likewise
import torch

from amp_lab.cli import main, printing
from amp_lab.parallel import ranks

CONTEXT = multiprocessing.get_context("forkserver")
# Of the one fork server that a process has: whoever starts it first decides.
LOADED = [
    "amp_lab.train.checkpoint.shards",
    "amp_lab.train.run",
    "amp_lab.plots",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "sklearn.datasets",  # what the digits are read with
    "torchvision",
]


@dataclass
class Ended:
    """How a process ended."""

    code: int
    value: object
    """What the function returned; None if it did not."""
    out: str
    err: str


def values_of(function, size: int, *arguments) -> list:
    """What a function returns in each of `size` processes that find each other."""
    ended = run_ranks(function, size, *arguments)
    assert [one.code for one in ended] == [0] * size, "\n".join(one.err for one in ended)
    return [one.value for one in ended]


def run_ranks(function, size: int, *arguments, each=(), timeout_s: float = 120, **environment):
    """Call a function in `size` processes; return how each `Ended`.

    `each` gives further arguments by rank. The environment is torchrun's, and what is given. A
    process that does not end in time is killed, and fails the test.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = start_ranks(function, size, Path(folder), *arguments, each=each, **environment)
        end = time.monotonic() + timeout_s
        try:
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
            late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        finally:
            for process in processes:
                process.kill()
                process.join()
        ended = [_ended(Path(folder), rank, p.exitcode) for rank, p in enumerate(processes)]
    assert not late, f"ranks {late} did not end within {timeout_s} s: {ended}"
    return ended


def start_ranks(function, size: int, folder: Path, *arguments, each=(), **environment) -> list:
    """The same without waiting; what the processes print is in `folder`, as 0.out, 0.err, …"""
    CONTEXT.set_forkserver_preload(LOADED)
    port = free_port()
    processes = []
    for rank in range(size):
        settings = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        settings |= environment
        further = (each[rank],) if each else ()
        process = CONTEXT.Process(
            target=_run, args=(function, folder, rank, settings, (*arguments, *further))
        )
        process.start()
        processes.append(process)
    return processes


def free_port() -> int:
    """A port at which nothing listens, from those that Linux gives to no connection by itself.

    A port that the system chooses may be taken by a connection of another test before the first
    rank listens at it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def start_torchrun(size: int, log: Path, *line: str, restarts: int = 0):
    """The agent of torchrun, in a process group of its own, with `amp-lab` in each worker.

    It forks its workers, which so have loaded what it has; all else is as torchrun does it. One of
    them is ended with `kill_at_work`.

    The agent must not call `torch.set_num_threads`: torch would make a thread pool, which each
    forked worker has to replace. Under FSDP eight autograd threads start with the first backward
    pass and do so at once. If one of them finds the old pool gone and the new one not yet there,
    torch aborts with "Invalid thread pool!" (pytorch/pytorch#178535). The workers of the real
    torchrun are not forked, and never see this.
    """
    CONTEXT.set_forkserver_preload(LOADED)
    process = CONTEXT.Process(target=_torchrun, args=(size, restarts, log, line))
    process.start()
    return process


def _torchrun(size: int, restarts: int, log: Path, line: tuple[str, ...]) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.setsid()
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=uuid.uuid4().hex,
        max_restarts=restarts,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )
    elastic_launch(config, _worker)(log, *map(str, line))


def _worker(log: Path, *line: str) -> None:
    torch.set_num_threads(1)  # what OMP_NUM_THREADS=1 does in a worker of torchrun
    code = main(list(line))
    if code:
        sys.exit(code)
    _returned(log, os.getpid()).touch()


def _returned(log: Path, pid: int) -> Path:
    return log.with_suffix(f".{pid}")


def lose_a_worker(out: Path, line: list[str], chance: random.Random) -> None:
    """Run two workers under torchrun, and kill one at a random moment; the run must end all right.

    `line` is what trains into the folder `out`.
    """
    log = out.with_suffix(".log")
    process = start_torchrun(2, log, *line, restarts=2)
    try:
        while not (out / "config.json").exists():
            assert process.is_alive(), log.read_text()
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 2))
        kill_at_work(process, log, chance)
        process.join(120)
        assert process.exitcode == 0, log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def kill_at_work(process, log: Path, chance: random.Random) -> None:
    """Kill -9 one of the workers of `start_torchrun`, unless it has returned by then.

    One that has waits for an event of torch's. If it dies there, the agent waits for ever when it
    sets the event: torch's `MultiprocessContext` says so, and is for forked workers alone. What
    torchrun starts as a command knows no such event.
    """
    children = Path(f"/proc/{process.pid}/task").glob("*/children")
    workers = [int(pid) for path in children for pid in path.read_text().split()]
    if not workers:
        return
    worker = chance.choice(workers)
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGSTOP)
        while _state(worker) not in "TZ":
            time.sleep(0.001)
        os.kill(worker, signal.SIGCONT if _returned(log, worker).exists() else signal.SIGKILL)


def _state(pid: int) -> str:
    """The letter of the process in /proc: T if it has been stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None


def command(*line: str) -> int:
    """`amp-lab …` in a process of `run_ranks`."""
    return main([str(part) for part in line])


def command_by_rank(line: list[str]) -> int:
    """The same with a line of its own for each rank."""
    return command(*line)


def _run(function, folder: Path, rank: int, settings: dict, arguments: tuple) -> None:
    for number, name in enumerate(("out", "err"), 1):
        with (folder / f"{rank}.{name}").open("a") as file:
            os.dup2(file.fileno(), number)
    os.environ.update({name: str(value) for name, value in settings.items() if value is not None})
    torch.set_num_threads(1)
    # No torchrun is there that would end the others before they say what the first one has said.
    for module in (printing, ranks):
        module.time = types.SimpleNamespace(sleep=lambda seconds: None)
    value = function(*arguments)
    if type(value) is int:  # a command's
        sys.exit(value)
    torch.save(value, folder / f"{rank}.pt")


def _ended(folder: Path, rank: int, code: int) -> Ended:
    value = None
    with contextlib.suppress(FileNotFoundError):
        value = torch.load(folder / f"{rank}.pt", weights_only=True)
    return Ended(
        code, value, (folder / f"{rank}.out").read_text(), (folder / f"{rank}.err").read_text()
    )
