"""What goes wrong around `max serve`: a clear message, and a disk that is right.

Each server has a compile cache of its own, seeded with the graphs it needs, so that
nothing is compiled but where that is the question.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from attnquant.graph_cache import cache_folder, used_files
from attnquant.testing.parity import make_bundle
from attnquant.testing.server import Server, serving_with
from gemma3_support import golden
from gemma3_support.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
GOLDEN = golden.load(ROOT / "attnquant-gemma3" / "tests" / "golden" / "tiny.npz")
RECORD = next(
    r
    for r in GOLDEN.records
    if (r.source, r.setting.name, r.prompt) == ("tied", "g3-r4-all", "window")
)
CUT = "\N{REPLACEMENT CHARACTER}"
START = 300
"""Seconds within which a start out of the cache is done, on busy machines too."""

COMPILE = 900

# Mounts that the command alone sees.
NAMESPACE = ("unshare", "--mount", "sh", "-ec")
CAN_MOUNT = (
    shutil.which("unshare") is not None
    and subprocess.run(
        [*NAMESPACE, "mount -t tmpfs none /mnt"], capture_output=True, check=False
    ).returncode
    == 0
)
mounts = pytest.mark.skipif(not CAN_MOUNT, reason="mounting needs root, on Linux")


class Machine:
    """Starts servers of one bundle that share a compile cache, and stops them all."""

    def __init__(self, folder: Path, bundle: Path, seed: Path) -> None:
        self.folder = folder
        self.bundle = folder / "bundle"
        self.cache = folder / "cache"
        shutil.copytree(bundle, self.bundle)
        shutil.copytree(seed, self.cache)
        self.servers: list[Server] = []

    @property
    def log(self) -> Path:
        return self.folder / f"serve{len(self.servers)}.log"

    def start(
        self,
        *extra: str,
        environ: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
        port: int | None = None,
    ) -> Server:
        with self.log.with_name(f"serve{len(self.servers) + 1}.log").open("wb") as log:
            server = Server(
                self.bundle,
                log,
                *extra,
                environ={"MODULAR_CACHE_DIR": str(self.cache)} | dict(environ or {}),
                before=before,
                port=port,
            )
        self.servers.append(server)
        return server

    def said(self) -> str:
        """Return what the server that was started last wrote."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def check_served(self, server: Server) -> None:
        """Wait until a server answers, and check that it does so as recorded."""
        server.wait_until_served(COMPILE)
        assert answer(server, self.bundle) == expected(self.bundle)

    def check_next_start(self) -> None:
        server = self.start()
        self.check_served(server)
        server.stop()

    def graphs(self) -> list[Path]:
        """Return the files of compiled graphs, the smallest first."""
        found = (self.cache / ".max_cache").rglob("*")
        return sorted((f for f in found if f.is_file()), key=lambda f: f.stat().st_size)


def answer(server: Server, bundle: Path, tokens: int = 24) -> str:
    done = server.client.completions.create(
        model=str(bundle),
        prompt=list(RECORD.tokens),
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    return done.choices[0].text.rstrip(CUT)


def expected(bundle: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(bundle)
    return str(tokenizer.decode(RECORD.greedy, skip_special_tokens=True)).rstrip(CUT)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("faults")
    checkpoint = write_tiny_checkpoint(root / "tied", **GOLDEN.source("tied").recipe)
    return make_bundle(checkpoint, RECORD.setting, root / "bundle")


@pytest.fixture(scope="module")
def seed(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compile cache with the graphs that serving the bundle needs, and no more."""
    ordinary = cache_folder()
    seed = tmp_path_factory.mktemp("seed")
    with (
        (bundle.parent / "seed.log").open("wb") as log,
        serving_with(bundle, log) as server,
    ):
        server.wait_until_served()
        worker = worker_of(server, ordinary)
        for name in used_files(ordinary, Path(f"/proc/{worker}/maps")) or ():
            target = seed / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ordinary / name, target)
    return seed


@pytest.fixture
def machine(tmp_path: Path, bundle: Path, seed: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path, bundle, seed)
    yield machine
    for server in machine.servers:
        server.stop()


def processes(server: Server) -> list[int]:
    """Return the running processes of a server's group."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text(encoding="utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == server.process.pid and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


def spawned(server: Server) -> list[int]:
    """Return those of a server's processes that Python's multiprocessing spawned."""
    found = []
    for pid in processes(server):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"spawn_main" in command:
            found.append(pid)
    return found


def worker_of(server: Server, cache: Path) -> int:
    """Return the process that runs the model: the one with compiled graphs mapped."""
    (found,) = (
        pid for pid in processes(server) if used_files(cache, Path(f"/proc/{pid}/maps"))
    )
    return found


def wait_until(true: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


# -------------------------------------------------------------------------- processes


def test_a_killed_worker_ends_the_server_which_says_so(machine: Machine) -> None:
    server = machine.start()
    server.wait_until_served(START)
    failed: list[Exception] = []

    def ask() -> None:
        try:
            answer(server, machine.bundle, 800)
        except openai.APIError as error:
            failed.append(error)

    client = threading.Thread(target=ask)
    client.start()
    time.sleep(1)
    os.kill(worker_of(server, machine.cache), signal.SIGKILL)
    assert server.wait_until_ended(60) != 0
    client.join(60)
    # Who was being answered hears of it, and does not wait for ever.
    assert len(failed) == 1
    assert "Worker crashed (Killed), shutting down" in machine.said()
    wait_until(lambda: not processes(server))


def test_a_killed_server_takes_its_worker_along_and_the_next_start_works(
    machine: Machine,
) -> None:
    server = machine.start()
    server.wait_until_served(START)
    worker = worker_of(server, machine.cache)
    server.process.kill()
    server.process.wait()
    wait_until(lambda: worker not in processes(server))
    assert "the server is gone, and its worker ends with it" in machine.said()
    machine.check_next_start()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "line", ["Starting subprocess: Model Worker", "weights loaded"]
)
def test_a_server_killed_while_it_starts_leaves_nothing_and_the_next_works(
    machine: Machine, line: str
) -> None:
    server = machine.start()
    wait_until(lambda: line in machine.said() and len(spawned(server)) == 2, START)
    # MAX's process of metrics was spawned before it, and stays; it holds little.
    worker = max(spawned(server))
    server.process.kill()
    server.process.wait()
    wait_until(lambda: worker not in processes(server), START)
    machine.check_next_start()


@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", ["compiling", "writing"])
def test_a_server_killed_while_it_compiles_leaves_a_cache_that_is_right(
    machine: Machine, moment: str
) -> None:
    model = machine.graphs()[-1]
    model.unlink()
    before = set(machine.cache.rglob("*"))
    server = machine.start()
    if moment == "compiling":
        wait_until(lambda: " built in " in machine.said(), START)
        time.sleep(20)
    else:
        # The moment a file of the graphs' folder appears, under whatever name.
        wait_until(lambda: set(model.parent.iterdir()) - before, COMPILE)
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    machine.check_next_start()
    assert " compile cache: miss: " in machine.said() or moment == "writing"
    machine.check_next_start()
    assert " compile cache: hit, " in machine.said()


# ------------------------------------------------------------------------------ cache


def truncate(_: Machine, graph: Path) -> str:
    os.truncate(graph, graph.stat().st_size // 2)
    return "it is damaged"


def flip_a_bit(_: Machine, graph: Path) -> str:
    content = bytearray(graph.read_bytes())
    content[len(content) // 2] ^= 1
    graph.write_bytes(content)
    return "it is damaged"


def take_another(machine: Machine, graph: Path) -> str:
    # What it was is known from a start before.
    machine.check_next_start()
    other = next(path for path in machine.graphs() if path != graph)
    graph.write_bytes(other.read_bytes())
    return "it was exchanged"


@pytest.mark.exhaustive
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, take_another])
@pytest.mark.parametrize("place", [0, -1])
def test_a_damaged_or_foreign_graph_is_told_of_and_compiled_anew(
    machine: Machine, damage: Callable[[Machine, Path], str], place: int
) -> None:
    graph = machine.graphs()[place]
    reason = damage(machine, graph)
    machine.check_next_start()
    assert f"removed {graph} from the compile cache, since {reason}" in machine.said()
    machine.check_next_start()
    assert "removed" not in machine.said()


@pytest.mark.exhaustive
@mounts
def test_a_full_disk_ends_the_start_and_is_told_of(
    machine: Machine,
) -> None:
    graph = machine.graphs()[0]
    graph.unlink()
    full = machine.folder / "full"
    full.mkdir()
    kilobytes = sum(path.stat().st_size for path in machine.graphs()) // 1024 + 200
    script = (
        f'mount -t tmpfs -o size={kilobytes}k none "{full}";'
        f' cp -a "{machine.cache}/." "{full}"; exec "$@"'
    )
    server = machine.start(
        environ={"MODULAR_CACHE_DIR": str(full)}, before=(*NAMESPACE, script, "sh")
    )
    assert server.wait_until_ended(START) != 0
    assert "available space" in machine.said()


@pytest.mark.exhaustive
@mounts
def test_with_a_home_that_cannot_be_written_to_the_model_is_served(
    machine: Machine,
) -> None:
    home = machine.folder / "home"
    home.mkdir()
    script = (
        f'mount -t tmpfs none "{home}"; mkdir -p "{home}/.cache/modular";'
        f' cp -a "{machine.cache}/." "{home}/.cache/modular";'
        f' mount -o remount,ro "{home}"; unset MODULAR_CACHE_DIR; exec "$@"'
    )
    server = machine.start(
        environ={"HOME": str(home)}, before=(*NAMESPACE, script, "sh")
    )
    machine.check_served(server)


# ----------------------------------------------------------------------------- bundle


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_a_bundle_that_goes_away_does_not_trouble_who_is_served_from_it(
    machine: Machine, change: str
) -> None:
    server = machine.start()
    machine.check_served(server)
    text = expected(machine.bundle)
    (shard,) = machine.bundle.glob("*.safetensors")
    if change == "deleted":
        shard.unlink()
    else:
        other = machine.folder / "other"
        other.write_bytes(bytes(shard.stat().st_size))
        other.replace(shard)
    assert answer(server, machine.bundle) == text
    server.stop()
    again = machine.start()
    assert again.wait_until_ended(START) != 0
    assert "compatible weights cannot be found" in machine.said()


def write_anew(shard: Path) -> str:
    shard.write_bytes(bytes(shard.stat().st_size))
    return f"{shard} was written to while it is served from"


def cut_short(shard: Path) -> str:
    os.truncate(shard, 100_000)
    # Whoever comes first: who looks at it each second, or a batch that reads it.
    return "Worker crashed"


@pytest.mark.parametrize(
    "write", [write_anew, pytest.param(cut_short, marks=pytest.mark.exhaustive)]
)
def test_a_bundle_that_is_written_to_in_place_ends_the_server_and_not_in_nonsense(
    machine: Machine, write: Callable[[Path], str]
) -> None:
    server = machine.start()
    machine.check_served(server)
    (shard,) = machine.bundle.glob("*.safetensors")
    kept = shard.read_bytes()
    message = write(shard)
    assert server.wait_until_ended(60) != 0
    assert message in machine.said()
    shard.write_bytes(kept)
    machine.check_next_start()


# ---------------------------------------------------------------------------- machine


def test_a_port_that_is_taken_is_named(machine: Machine) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = machine.start(port=port)
        assert server.wait_until_ended(START) != 0
    assert re.search(rf"port {port} is already in use", machine.said())


@pytest.mark.exhaustive
def test_without_file_handles_clients_wait_and_are_answered_once_there_are_some(
    machine: Machine,
) -> None:
    server = machine.start(before=("prlimit", "--nofile=256"))
    machine.check_served(server)
    held = []
    try:
        for _ in range(400):
            one = socket.create_connection(("127.0.0.1", server.port), timeout=5)
            held.append(one)
    except OSError:
        # The queue of those who wait is full as well.
        assert len(held) > 200
    finally:
        for one in held:
            one.close()
    machine.check_served(server)


@pytest.mark.exhaustive
def test_too_few_file_handles_to_start_end_the_server(machine: Machine) -> None:
    server = machine.start(before=("prlimit", "--nofile=16"))
    assert server.wait_until_ended(START) != 0
    assert not processes(server)


@pytest.mark.exhaustive
def test_a_length_beyond_memory_is_cut_to_what_fits(machine: Machine) -> None:
    machine.start("--max-length", "100000000")
    wait_until(lambda: "Clamping max_length from 100000000 to" in machine.said(), START)
