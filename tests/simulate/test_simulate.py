"""The simulation conserves what it must, is right where a formula says so, and repeats itself."""

from __future__ import annotations

from collections import Counter

import pytest
from attrs import evolve

from pushkv.core.errors import ConfigurationError, LocalProtocolError
from pushkv.simulate.fabric import Fabric, Poster
from pushkv.simulate.pool import Pool
from pushkv.simulate.run import Interrupted, Result, Spread, simulate
from pushkv.simulate.settings import (
    PUSHES,
    Deployment,
    Design,
    EngineModel,
    Faults,
    LinkModel,
    Settings,
    Traffic,
)
from pushkv.simulate.timeline import Timeline
from pushkv.simulate.world import World

ENGINE = EngineModel(
    prefill_step_s=0.02,
    prefill_token_s=2e-5,
    decode_step_s=6e-3,
    decode_context_s=8e-9,
    leg_s=2e-3,
    leg_token_s=1e-6,
    blocks=20_000,
)
LINK = LinkModel(
    bandwidth_bytes_s=50e9,
    latency_s=0.01,
    descriptors_per_token=1.0,
    descriptor_s=2.4e-6,
    control_s=2e-4,
    proxy_s=1e-3,
)
TRAFFIC = Traffic(rate_hz=4, requests=60, prompt_tokens=4096, output_tokens=32, spread=0.7)
every_design = pytest.mark.parametrize("design", list(Design))


def settings(design: Design, **changed: object) -> Settings:
    plain = Settings(design, ENGINE, LINK, Deployment(2, 2), TRAFFIC, seed=3)
    return evolve(plain, **changed)  # type: ignore[arg-type]


# -- what is conserved


@every_design
@pytest.mark.parametrize("rate", [1.0, 40.0])
def test_every_request_ends_once_and_all_blocks_come_back(design: Design, rate: float) -> None:
    world = World(settings(design, traffic=evolve(TRAFFIC, rate_hz=rate)))
    ended: Counter[int] = Counter()
    end = world.end

    def noted(request: object) -> None:
        ended[request.number] += 1  # type: ignore[attr-defined]
        end(request)  # type: ignore[arg-type]

    world.end = noted  # type: ignore[method-assign]
    assert world.run()
    assert ended == Counter(range(TRAFFIC.requests))
    assert all(engine.pool.whole() for engine in world.engines.values())
    for request in world.requests:
        one = request.now
        assert one is not None
        assert request.arrival < one.prefilled_at <= request.first_at
        assert request.first_at <= request.ended_at
        if design is not Design.MONOLITHIC:
            assert one.waits_at <= one.admitted_at < one.delivered_at < request.first_at
            assert one.prefilled_at < one.delivered_at
    assert not any(world.load.values())


@every_design
def test_every_byte_is_moved_once(design: Design) -> None:
    world = World(settings(design))
    assert world.run()
    tokens = sum(request.prompt for request in world.requests)
    moved = 0 if design is Design.MONOLITHIC else tokens * LINK.token_bytes
    assert world.fabric.moved_bytes == moved


def test_what_is_cached_at_decode_is_not_moved() -> None:
    world = World(settings(Design.PUSH_EARLY, traffic=evolve(TRAFFIC, cached_decode=0.5, spread=0)))
    assert world.run()
    assert world.fabric.moved_bytes == 60 * 2048 * LINK.token_bytes


def test_blocks_are_given_back_once_and_by_who_has_them() -> None:
    pool = Pool(4)
    assert pool.take("a", 3) is not None
    assert pool.take("b", 2) is None
    with pytest.raises(LocalProtocolError, match="already"):
        pool.take("a", 1)
    with pytest.raises(LocalProtocolError, match="has not"):
        pool.give_back("b")
    assert not pool.whole()
    pool.give_back("a")
    assert pool.whole()
    assert pool.held_most == 3


# -- deaths


@pytest.mark.parametrize("design", PUSHES)
@pytest.mark.parametrize("proof_s", [0.5, 30.0])
def test_prefill_engines_die_and_nothing_is_lost(design: Design, proof_s: float) -> None:
    faults = Faults(deaths_hz=1.0, proof_s=proof_s, restarts_most=9)
    world_settings = settings(
        design, faults=faults, traffic=evolve(TRAFFIC, rate_hz=6.0, prompt_tokens=8192)
    )
    result = simulate(world_settings)
    assert result.ended == result.requests == 60
    assert result.failed == 0
    assert result.deaths > 3
    assert result.tries > 1
    if design is Design.PUSH_EARLY:
        assert result.quarantined_most > 0, "registered blocks wait for the proof"


def test_a_request_that_loses_too_many_engines_fails() -> None:
    result = simulate(settings(Design.PUSH_EARLY, faults=Faults(4.0, 0.1, 1.0, 0)))
    assert result.failed > 0
    assert result.ended == result.requests


def test_a_small_budget_keeps_requests_waiting() -> None:
    crowd = evolve(TRAFFIC, rate_hz=20.0)
    wide = simulate(settings(Design.PUSH_EARLY, traffic=crowd))
    tight = simulate(settings(Design.PUSH_EARLY, traffic=crowd, faults=Faults(budget_share=0.04)))
    assert tight.wait_s.mean > 3 * wide.wait_s.mean
    assert tight.ended == tight.requests


@pytest.mark.parametrize(("design", "machines"), [(Design.PULL, True), (Design.PUSH_EARLY, False)])
def test_deaths_need_machines(design: Design, machines: bool) -> None:
    with pytest.raises(ConfigurationError, match="deaths_hz"):
        World(settings(design, machines=machines, faults=Faults(deaths_hz=1.0)))


# -- what must be equal


@every_design
def test_the_seed_decides_all(design: Design) -> None:
    first, again = simulate(settings(design)), simulate(settings(design))
    assert first.digest == again.digest
    assert evolve(first, cpu_s=0) == evolve(again, cpu_s=0)
    assert simulate(settings(design, seed=4)).digest != first.digest


@pytest.mark.parametrize("design", PUSHES)
def test_machines_take_as_long_as_their_latencies_say(design: Design) -> None:
    """Why a fit and the largest fleets may do without: but for the first connections."""
    with_, without = (simulate(settings(design, machines=each)) for each in (True, False))
    opening = 4 * LINK.control_s
    for field in ("ttft_s", "tpot_s", "handover_s"):
        one, other = getattr(with_, field), getattr(without, field)
        assert abs(one.mean - other.mean) < opening, field
        assert abs(one.p50 - other.p50) < opening, field
    assert with_.messages > without.messages


@pytest.mark.parametrize("rate", [0.2, 8.0])
def test_designs_differ_by_a_step_at_most_where_handing_over_is_free(rate: float) -> None:
    """A decode engine takes blocks at one step and begins at the next, unless it was told early."""
    engine = evolve(ENGINE, leg_s=0.0, leg_token_s=0.0, decode_context_s=0.0)
    alone, pull, thread, early, late = (
        simulate(
            settings(
                design,
                engine=engine,
                link=LinkModel(bandwidth_bytes_s=1e18),
                deployment=Deployment(),
                traffic=evolve(TRAFFIC, rate_hz=rate),
            )
        ).ttft_s
        for design in (Design.MONOLITHIC, *list(Design)[1:])
    )
    step = engine.decode_step_s
    assert pull == thread == late
    assert early.mean <= late.mean <= early.mean + step
    if rate < 1:
        assert early.p50 == late.p50 == pytest.approx(alone.p50 + step, abs=1e-7), "nobody decodes"
    else:
        assert early.mean < late.mean


def test_where_nothing_is_free_early_is_before_late_and_late_before_pull_under_load() -> None:
    busy = evolve(TRAFFIC, rate_hz=10, prompt_tokens=8192, cached_prefill=1.0)
    link = evolve(LINK, descriptors_per_token=2.0)
    early, late, pull = (
        simulate(settings(design, traffic=busy, link=link)).ttft_s.mean
        for design in (Design.PUSH_EARLY, Design.PUSH_LATE, Design.PULL)
    )
    assert early < late < pull


@every_design
def test_more_load_is_never_faster(design: Design) -> None:
    means = [
        simulate(settings(design, traffic=evolve(TRAFFIC, rate_hz=rate, requests=120))).ttft_s.mean
        for rate in (1.0, 8.0, 16.0, 64.0)
    ]
    assert means == sorted(means)


# -- what a formula says


def test_one_queue_waits_as_long_as_pollaczek_and_khinchine_say() -> None:
    """M/D/1: service of 20 ms, one at a time; the mean wait is load / (2 (1 - load)) services."""
    service, load, runs = 0.02, 0.7, 8
    engine = EngineModel(prefill_step_s=service, slots=1)
    traffic = Traffic(load / service, requests=4000, prompt_tokens=16, output_tokens=1)
    # A design's second engine would be a second server.
    waits = []
    for seed in range(runs):
        world = World(Settings(Design.MONOLITHIC, engine, LINK, traffic=traffic, seed=seed))
        world.prefills = world.prefills[:1]
        assert world.run()
        times = [(each.first_at - each.arrival) / 1e9 - service for each in world.requests]
        waits.append(sum(times) / len(times))
    mean = sum(waits) / runs
    deviation = (sum((each - mean) ** 2 for each in waits) / (runs - 1)) ** 0.5
    expected = load / (2 * (1 - load)) * service
    assert abs(mean - expected) < 3 * deviation / runs**0.5
    assert deviation < expected / 4, "or the comparison says nothing"


def test_an_idle_pair_takes_the_sum_of_its_parts() -> None:
    traffic = Traffic(0.01, requests=3, prompt_tokens=4096, output_tokens=3)
    engine = evolve(ENGINE, decode_context_s=0.0)
    leg = 2e-3 + 4096e-6
    prefill = 0.02 + 4096 * 2e-5
    post, move = 4096 * 2.4e-6, 0.01 + 4096 * 262_144 / 50e9
    pull = leg + prefill + 1e-3 + leg + post + move + 6e-3
    early = leg + prefill + post + move + 2e-4 + 6e-3
    for design, expected in (
        (Design.PULL, pull),
        (Design.PULL_THREAD, pull),
        (Design.PUSH_LATE, pull + 4e-4),
        (Design.PUSH_EARLY, early),
        (Design.MONOLITHIC, leg + prefill),
    ):
        result = simulate(settings(design, engine=engine, traffic=traffic, machines=False))
        assert result.ttft_s.p50 == pytest.approx(expected, abs=1e-6), design
        assert result.tpot_s.p50 == pytest.approx(6e-3, abs=1e-6)


def test_a_long_prompt_is_computed_in_chunks_beside_what_decodes() -> None:
    engine = evolve(ENGINE, chunk_tokens=1000, leg_s=0.0, leg_token_s=0.0)
    traffic = Traffic(0.01, requests=2, prompt_tokens=2500, output_tokens=1)
    result = simulate(settings(Design.MONOLITHIC, engine=engine, traffic=traffic))
    assert result.ttft_s.p50 == pytest.approx(3 * 0.02 + 2500 * 2e-5, abs=1e-6)


def test_prompts_that_come_together_share_a_chunk() -> None:
    engine = evolve(ENGINE, chunk_tokens=1000, leg_s=0.0, leg_token_s=0.0)
    traffic = Traffic(1e9, requests=2, prompt_tokens=600, output_tokens=1)
    world = World(settings(Design.MONOLITHIC, engine=engine, traffic=traffic))
    world.prefills = world.prefills[:1]
    assert world.run()
    # The first, who is alone when he comes, is computed alone; then 600 tokens, not 1,000.
    first, second = (request.first_at - world.timeline.start for request in world.requests)
    assert first == pytest.approx(0.032e9, rel=1e-3)
    assert second == pytest.approx(0.064e9, rel=1e-3)
    four = evolve(traffic, requests=4)
    world = World(settings(Design.MONOLITHIC, engine=engine, traffic=four))
    world.prefills = world.prefills[:1]
    assert world.run()
    times = [request.first_at - world.timeline.start for request in world.requests]
    assert times[1] == pytest.approx(0.072e9, rel=1e-3), "with 400 tokens of the next"
    assert times[2] == times[3] == pytest.approx(0.108e9, rel=1e-3)


def test_who_decodes_waits_while_a_pull_is_posted_inside_the_loop() -> None:
    busy = evolve(TRAFFIC, rate_hz=6, prompt_tokens=8192, cached_prefill=1.0)
    inside, beside = (
        simulate(settings(design, traffic=busy)).tpot_s.mean
        for design in (Design.PULL, Design.PULL_THREAD)
    )
    assert inside > 1.02 * beside


def test_transfers_share_an_adapter_equally() -> None:
    timeline = Timeline()
    fabric = Fabric(timeline, LinkModel(bandwidth_bytes_s=1e9))
    ended: dict[str, int] = {}
    for name, source, size in (("a", "p0", 1000), ("b", "p1", 500), ("c", "p2", 100)):
        target = "d1" if name == "c" else "d0"
        fabric.start(
            source,
            target,
            size,
            lambda name=name: ended.update({name: timeline.now}),  # type: ignore[misc]
        )
    while timeline.step():
        pass
    at = {name: when - timeline.start for name, when in ended.items()}
    assert at == {"c": 100, "b": 1000, "a": 1500}


def test_a_thread_posts_one_after_the_other() -> None:
    timeline = Timeline()
    poster, posted = Poster(timeline), []
    for takes in (50, 20):
        poster.post(takes, lambda: posted.append(timeline.now - timeline.start))
    while timeline.step():
        pass
    assert posted == [50, 70]


# -- the rest


def test_ctrl_c_leaves_what_had_ended_and_says_that_it_is_partial() -> None:
    def stop(ended: int) -> None:
        if ended > 500:
            raise KeyboardInterrupt

    many = evolve(TRAFFIC, requests=4000, rate_hz=8)
    with pytest.raises(Interrupted) as caught:
        simulate(settings(Design.PUSH_EARLY, traffic=many), stop)
    result: Result = caught.value.result
    assert result.partial
    assert 500 < result.ended < 4000
    assert result.ttft_s.n == result.ended


def test_percentiles_are_values_that_occurred() -> None:
    assert Spread.of([float(n) for n in range(100, 0, -1)]) == Spread(50.5, 50, 95, 99, 100)
    assert Spread.of([7.0]) == Spread(7, 7, 7, 7, 1)
    assert Spread.of([]).n == 0


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Traffic(rate_hz=0), "rate_hz"),
        (lambda: Traffic(cached_prefill=1.5), "cached_prefill"),
        (lambda: EngineModel(slots=0), "slots"),
        (lambda: EngineModel(decode_step_s=-1.0), "decode_step_s"),
        (lambda: LinkModel(bandwidth_bytes_s=0), "bandwidth_bytes_s"),
        (lambda: Deployment(prefill=0), "prefill"),
        (lambda: Faults(budget_share=2), "budget_share"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: object, field: str) -> None:
    with pytest.raises(ConfigurationError, match=field):
        make()  # type: ignore[operator]
