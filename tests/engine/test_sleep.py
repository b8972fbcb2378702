"""Sleep gives the memory back, wakes for whoever asks, and changes no bit of what is answered."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from typer.testing import CliRunner

from cache.arms import Pending, text
from live import serving
from soloist.checks.base import Subject
from soloist.checks.live import SERVER_CHECKS
from soloist.cli import app
from soloist.demo import path as demo_path
from soloist.doctor import examine
from soloist.engine import build, kept
from soloist.engine.kept import ParkedStorages, tensors_of
from soloist.engine.sleep import Sleeper
from soloist.errors import CapacityError, ContextLengthError, OverloadedError
from soloist.models.vision import VisionTower
from soloist.ops import card_products
from soloist.ops.linear import QuantizedWeight
from soloist.ops.linear_cuda import Workspace
from soloist.sampling.params import SamplingParams
from soloist.server.template import ChatTemplate
from soloist.server.tokenizer import Tokenizer
from soloist.settings import resolve
from tiny import build_tiny

PROMPT = text(200, 250, seed=3)


def sleeper(model: Path | str, idle_s: float = 0.0, **knobs: str) -> Sleeper:
    settings = resolve({"model": str(model), "threads": "1", "max_len": "2048", **knobs}, {}, {})
    return Sleeper(lambda kept: build.build_engine(settings, kept=kept), idle_s=idle_s, max_queue=2)


def ask(engine: Sleeper, prompt: list[int] = PROMPT, tokens: int = 8) -> Pending:
    return Pending(engine, prompt, SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=0))


def settled(engine: Sleeper) -> None:
    deadline = time.monotonic() + 60
    while engine._engine._settling():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def engine(tiny):
    made = sleeper(tiny)
    yield made
    made.close()


@pytest.fixture
def demo():
    made = sleeper("demo")
    yield made
    made.close()


def test_memory_comes_back_and_answers_stay(demo):
    engine = demo
    cold = ask(engine).answer()
    settled(engine)
    weights = sum(t.nbytes for t in tensors_of(engine._engine.model, engine._engine.speculation))
    pool = sum(t.nbytes for t in tensors_of(engine._engine.memory))
    gone = [weakref.ref(x) for x in (engine._engine, engine._engine.model, engine._engine.memory.kv)]
    awake = resident()
    engine.sleep()
    assert all(ref() is None for ref in gone), "something still holds the engine"
    assert awake - resident() > 0.8 * (weights + pool) > 20e6
    now = engine.status()
    assert now.wakefulness == "asleep" and now.pages_total == 0 and now.counters["sleeps"] == 1
    warm = ask(engine).answer()
    assert warm.bits == cold.bits and warm.cached == 192
    after = engine.status()
    assert after.wakefulness == "awake" and after.pages_total > 0
    assert after.counters["wakes"] == 1 and after.counters["finished_length"] == 2
    engine._engine.call(lambda: engine._engine.memory.check(engine._engine.everyone()))


def test_what_is_on_disk_is_not_kept_twice(tiny, tmp_path):
    engine = sleeper(tiny, session_dir=str(tmp_path))
    try:
        cold = ask(engine).answer()
        settled(engine)
        engine.sleep()
        assert list(tmp_path.glob("*")) and not any(node.host for node in engine._kept.prefix.nodes())
        warm = ask(engine).answer()
        assert warm.bits == cold.bits and warm.cached == 192
        assert engine._engine.reuse.prefix.stats.loaded_disk > 0
        other = ask(engine, text(200, 250, seed=4)).answer()
        settled(engine)
        engine.sleep()
        again = ask(engine, text(200, 250, seed=4)).answer()
        assert again.bits == other.bits and again.cached == 192, "the writer goes on after a sleep"
    finally:
        engine.close()


def test_a_busy_engine_goes_on(engine):
    running = ask(engine, tokens=200)
    while not engine.status().running:
        time.sleep(0.005)
    with pytest.raises(OverloadedError, match="running or waiting"):
        engine.sleep()
    assert len(running.answer().tokens) == 200 and engine.status().wakefulness == "awake"


def test_asking_twice_is_no_fault(engine):
    engine.wake()
    engine.sleep()
    engine.sleep()
    engine.wake()
    assert engine.status().counters["sleeps"] == engine.status().counters["wakes"] == 1


def test_it_sleeps_when_idle_and_wakes_by_itself(tiny):
    engine = sleeper(tiny, idle_s=0.3)
    try:
        first = ask(engine).answer()
        deadline = time.monotonic() + 60
        while engine.status().wakefulness != "asleep":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert ask(engine).answer().bits == first.bits
    finally:
        engine.close()


def test_requests_wait_for_a_waking_engine(engine, monkeypatch):
    engine.sleep()
    opened = threading.Event()
    make = build.build_engine
    monkeypatch.setattr(build, "build_engine", lambda *a, **k: opened.wait(60) and make(*a, **k))
    first, second = ask(engine), ask(engine, tokens=4)
    assert engine.alive and engine.status().waiting == 2
    with pytest.raises(OverloadedError, match="MAX_QUEUE"):
        ask(engine)
    with pytest.raises(ContextLengthError):
        ask(engine, PROMPT * 20)
    engine.cancel(second.request)
    assert second.events.get(timeout=5).finish_reason == "abort"
    opened.set()
    assert len(first.answer().tokens) == 8


def test_a_card_that_is_taken_is_said_and_tried_again(engine, monkeypatch):
    before = ask(engine).answer()
    settled(engine)
    engine.sleep()

    def taken(*_: object, **__: object) -> None:
        raise CapacityError("0.10 GiB of the card are free.", "Close other programs.")

    with monkeypatch.context() as patch:
        patch.setattr(build, "build_engine", taken)
        with pytest.raises(OverloadedError, match=r"cannot wake: 0\.10 GiB"):
            ask(engine).answer()
        with pytest.raises(OverloadedError, match="cannot wake"):
            engine.wake()
        assert engine.alive and "0.10 GiB" in engine.status().fault and engine.status().waiting == 0
    again = ask(engine).answer()
    assert again.bits == before.bits and again.cached == 192 and not engine.status().fault


def test_other_numerics_start_cold(engine):
    ask(engine).answer()
    settled(engine)
    engine.sleep()
    engine._kept.numerics = "another"
    assert ask(engine).answer().cached == 0


def test_over_http(demo, tmp_path):
    engine = demo
    directory = demo_path()
    tokenizer, template = Tokenizer.load(directory), ChatTemplate.load(directory)
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    with serving(engine, tokenizer, template, api_keys=("k",)) as live:
        live.service.sleeper = engine
        client = httpx.Client(base_url=live.url, timeout=60)
        key = {"Authorization": "Bearer k"}
        for path in ("/sleep", "/wake_up"):
            assert client.post(path).status_code == 401
        first = client.post("/v1/chat/completions", json=body, headers=key).json()
        assert client.post("/sleep", headers=key).json() == {"is_sleeping": True, "state": "asleep"}
        assert client.get("/is_sleeping").json()["is_sleeping"]
        ready = client.get("/ready")
        assert ready.status_code == 200 and ready.json()["state"] == "asleep"
        assert 'soloist:asleep{model_name="demo"} 1.0' in client.get("/metrics").text
        looked = examine(Subject({}, {"API_KEY": "k"}, tmp_path, server_url=live.url), SERVER_CHECKS)
        assert {f.check: f.outcome for f in looked if "pool" in f.check or f.check == "server"} == {
            "server": "asleep",
            "server-pool": "asleep",
        }
        assert all(f.status.value == "PASS" for f in looked), looked
        assert client.get("/health").status_code == 200 and client.get("/v1/models", headers=key).status_code == 200
        assert client.get("/is_sleeping").json()["is_sleeping"], "looking must not wake it"
        second = client.post("/v1/chat/completions", json=body, headers=key).json()
        assert second["choices"] == first["choices"] and not client.get("/is_sleeping").json()["is_sleeping"]
        assert client.post("/sleep", headers=key).status_code == 200
        assert client.post("/wake_up", headers=key).json()["state"] == "awake"


def test_parked_storages_keep_views_and_bits():
    """The road a card's weights take: by storage, so that views and whoever holds them come back too."""
    base = torch.arange(24, dtype=torch.float32).view(4, 6).clone()
    view, other = base[1:3], torch.full((5,), 7, dtype=torch.int8)
    expected = [t.clone() for t in (base, view, other)]
    parked = ParkedStorages([base, view, other])
    assert parked.nbytes == base.nbytes + other.nbytes
    assert base.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    parked.restore()
    parked.empty()
    parked.restore()
    parked.close()
    gc.collect()
    assert all(torch.equal(a, b) for a, b in zip((base, view, other), expected, strict=True))


def test_weights_come_back_as_they_were_taken(monkeypatch):
    """Side by side, as loading took them: in whole pieces they would leave a smaller pool than before the sleep."""
    weights, inside = torch.arange(6, dtype=torch.int8), []

    @contextmanager
    def side_by_side(device):
        inside.append(device.type)
        yield
        inside.append("out")

    monkeypatch.setattr(kept, "_on_card", lambda loaded: [weights])
    monkeypatch.setattr(kept, "side_by_side", side_by_side)
    monkeypatch.setattr(ParkedStorages, "restore", lambda self: inside.append("restored"))
    model = SimpleNamespace(device=torch.device("cuda"))
    assert kept.ParkedWeights((model, None, ())).restore()[0] is model
    assert inside == ["cuda", "restored", "out"]


def test_scratch_of_products_stays_where_it_is(monkeypatch):
    """It is the process's: taken along with a sleeping engine's weights, it left the next engine null pointers."""
    pytest.importorskip("triton")
    from soloist.ops.triton.dense import DenseProduct

    space = Workspace.__new__(Workspace)
    space.arch, space.row_tiles = 80, (8,)
    space.partials, space.arrivals = torch.full((64,), -1), torch.zeros(4, dtype=torch.int32)
    monkeypatch.setattr(card_products, "workspace", lambda device: space)
    monkeypatch.setattr("soloist.ops.scratch._parts", {})
    codes = torch.zeros(256, 16, dtype=torch.int32)
    weight = QuantizedWeight(codes, torch.ones(256, 1, dtype=torch.bfloat16), None, 4, 128, (256, 128))
    four = card_products.W4Linear(weight, torch.device("cpu"), torch.bfloat16)
    dense = DenseProduct(torch.ones(32, 512, dtype=torch.bfloat16))
    old = dense.parts, dense.arrivals
    larger = DenseProduct(torch.ones(64, 1024, dtype=torch.bfloat16))
    assert larger.parts is not old[0], "the old scratch has no other holder now"
    parked = ParkedStorages(tensors_of(four, dense))
    assert not any(t.untyped_storage().nbytes() for t in (four.packed.words, four.packed.scales, dense.weight))
    assert all(t.untyped_storage().nbytes() for t in (space.partials, space.arrivals, *old))
    parked.restore()
    assert torch.equal(dense.weight, torch.ones(32, 512, dtype=torch.bfloat16))


def test_closed_asleep_it_frees_the_weights(engine):
    """Page-locked memory must be unlocked before it is freed."""
    ask(engine).answer()
    engine.sleep()
    closed = []
    engine._kept.weights = SimpleNamespace(nbytes=0, close=lambda: closed.append(True))
    engine._kept.cache_for("another numerics")
    assert not closed, "another cache is no other weights"
    engine.close()
    engine.close()
    assert closed == [True], "once, however often it is closed"


def test_the_commands(demo, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    directory = demo_path()
    run = CliRunner().invoke
    with serving(demo, Tokenizer.load(directory), ChatTemplate.load(directory), api_keys=("k",)) as live:
        live.service.sleeper = demo
        monkeypatch.setenv("PORT", live.url.rpartition(":")[2])
        refused = run(app, ["sleep"])
        assert refused.exit_code == 2 and "refuses the key" in refused.stderr
        for command, state in (("sleep", "asleep"), ("wake", "awake")):
            done = run(app, [command, "--key", "k"])
            assert done.exit_code == 0 and done.stdout.strip() == state == demo.status().wakefulness
        running = ask(demo, tokens=300)
        while not demo.status().running:
            time.sleep(0.005)
        busy = run(app, ["sleep", "--key", "k"])
        assert busy.exit_code == 1 and "running or waiting" in busy.stderr
        running.answer()
    gone = run(app, ["wake"])
    assert gone.exit_code == 2 and "No server answers" in gone.stderr


def test_a_vision_tower_is_parked_too() -> None:
    """Its module is another library's: left out, it kept its place on the card while the engine slept."""
    tower = VisionTower.__new__(VisionTower)
    tower._module = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)).eval().requires_grad_(False)
    x = torch.randn(3, 8)
    before = tower._module(x)
    held = list(tensors_of(tower))
    assert {id(t) for t in (*tower._module.parameters(), *tower._module.buffers())} == {id(t) for t in held}
    parked = ParkedStorages(held)
    assert all(t.untyped_storage().nbytes() == 0 for t in held)
    parked.restore()
    assert torch.equal(tower._module(x), before)
