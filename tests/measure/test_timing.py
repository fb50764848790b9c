"""The stopwatch against a fake asynchronous device: work that was not waited for cannot be mis-timed."""

import time

import pytest
import torch

from trainstep.measure.timing import (
    ClockDisagreement,
    CpuClock,
    CudaClock,
    device_clock,
    time_in_turns,
    time_steps,
    time_window,
)

ISSUE_MS = 0.01


class FakeDevice:
    """A device with a queue and a host with a clock, both simulated. Launching returns at once; work takes its time."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.free_at_ms = 0.0

    def launch(self, work_ms: float) -> None:
        self.now_ms += ISSUE_MS
        self.free_at_ms = max(self.free_at_ms, self.now_ms) + work_ms

    def clock(self) -> float:
        return self.now_ms / 1e3

    def synchronize(self) -> None:
        self.now_ms = max(self.now_ms, self.free_at_ms)

    def record(self) -> float:
        return max(self.now_ms, self.free_at_ms)

    def elapsed_ms(self, start: float, end: float) -> float:
        return end - start


def two_phase_step(device: FakeDevice):
    def step(phase):
        with phase("forward"):
            for _ in range(10):
                device.launch(2.0)
        with phase("backward"):
            for _ in range(10):
                device.launch(4.0)

    return step


def test_asynchronous_work_is_timed_in_full():
    device = FakeDevice()
    timing = time_steps(two_phase_step(device), device=device, warmup=1, steps=3, clock=device.clock)

    for sample in timing.samples:
        assert sample.wall_ms == pytest.approx(60, abs=2 * ISSUE_MS)
        assert sample.laps["forward"].ms == pytest.approx(20, abs=2 * ISSUE_MS)
        assert sample.laps["backward"].ms == pytest.approx(40, abs=2 * ISSUE_MS)
        assert sample.laps["forward"].host_ms == pytest.approx(10 * ISSUE_MS)
        assert sample.wait_ms == pytest.approx(60 - 20 * ISSUE_MS, abs=2 * ISSUE_MS)


def test_work_left_over_from_before_is_not_counted():
    device = FakeDevice()
    device.launch(500.0)
    timing = time_steps(two_phase_step(device), device=device, warmup=0, steps=1, clock=device.clock)
    assert timing.first.wall_ms == pytest.approx(60, abs=2 * ISSUE_MS)


@pytest.mark.parametrize("timer", [time_steps, time_window])
def test_a_synchronisation_that_does_not_wait_is_caught(timer):
    class Broken(FakeDevice):
        def synchronize(self) -> None:
            pass

    device = Broken()
    with pytest.raises(ClockDisagreement, match="no time is reported"):
        timer(two_phase_step(device), device=device, warmup=0, steps=1, clock=device.clock)


class Fast(FakeDevice):
    """Its events say `factor` times the time that passed; a window does not begin when its clock does."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.now_ms = factor, 5000.0

    def elapsed_ms(self, start: float, end: float) -> float:
        return self.factor * (end - start)


@pytest.mark.parametrize(
    ("timer", "work_ms", "factor", "is_told"),
    [(time_steps, 60.0, 1.0, False), (time_steps, 60.0, 1.009, False), (time_steps, 60.0, 1.02, True),
     (time_steps, 60.0, 2.0, True), (time_steps, 60.0, 9.0, True), (time_steps, 1.0, 1.09, False),
     (time_steps, 1.0, 1.15, True), (time_window, 180.0, 1.0, False), (time_window, 180.0, 1.009, False),
     (time_window, 180.0, 1.02, True), (time_window, 180.0, 1.4, True)],
)  # fmt: skip
def test_clocks_that_disagree_by_more_than_their_resolution(timer, work_ms, factor, is_told):
    """One percent and a tenth of a millisecond, far less than an escaped kernel makes; of a window from its first step
    to its end."""
    device, steps = Fast(factor), 3 if timer is time_window else 1

    def step(phase):
        with phase("forward"):
            device.launch(work_ms / steps)

    def timed():
        return timer(step, device=device, warmup=0, steps=steps, clock=device.clock)

    if is_told:
        with pytest.raises(ClockDisagreement, match="cannot be trusted"):
            timed()
    else:
        found = sum(each.device_ms for each in timed().steps)
        assert found == pytest.approx(factor * work_ms, abs=2 * factor * ISSUE_MS)


def test_a_launch_bound_step_shows_in_the_wait():
    device = FakeDevice()

    def step(phase):
        with phase("forward"):
            for _ in range(100):
                device.launch(ISSUE_MS / 10)  # the device is done before the next launch

    sample = time_steps(step, device=device, warmup=0, steps=1, clock=device.clock).first
    assert sample.wait_ms < 0.01 * sample.wall_ms


def test_covering_work_hides_the_launches_and_is_not_counted():
    def step(phase):
        with phase("forward"):
            for _ in range(10):
                device.launch(ISSUE_MS / 100)

    device = FakeDevice()
    bare = time_steps(step, device=device, warmup=0, steps=1, clock=device.clock).first
    covered = time_steps(
        step, device=device, warmup=0, steps=1, clock=device.clock, cover=lambda: device.launch(50.0)
    ).first
    assert bare.device_ms > 9 * ISSUE_MS  # the device waited for the host between kernels
    assert covered.ms == covered.device_ms < 1 < covered.wall_ms
    assert covered.device_ms == pytest.approx(ISSUE_MS / 10)
    assert covered.laps["forward"].ms == pytest.approx(ISSUE_MS / 10)


def launch_bound(device, kernels):
    def step(phase):
        with phase("forward"):
            for _ in range(kernels):
                device.launch(ISSUE_MS / 100)

    return step


@pytest.mark.parametrize(
    ("most", "times", "seen_ms"), [(1, 1, 9), (5, 5, 5), (14, 14, 0.1), (15, 15, 0.1), (100, 15, 0.1)]
)
def test_work_too_short_to_cover_a_step_is_repeated(most, times, seen_ms):
    """1000 launches take the host 10 ms and the device 0.1; one piece of covering work takes the device 1 ms."""
    device, covers = FakeDevice(), []
    timing = time_steps(
        launch_bound(device, 1000), device=device, warmup=1, steps=3, clock=device.clock,
        cover=lambda: (covers.append(None), device.launch(1.0)), most_covers=most,
    )  # fmt: skip
    assert len(covers) == 1 + 3 * times, "before the first step once, then half as long again as the launches took"
    for sample in timing.samples:
        assert sample.issue_ms == pytest.approx(10, abs=0.01)
        assert sample.ms == pytest.approx(seen_ms, rel=0.02)
        assert sample.laps["forward"].ms == pytest.approx(seen_ms, rel=0.02)


def test_covering_work_is_as_long_as_the_last_step_needs():
    device, covers, kernels = FakeDevice(), [], iter([1000, 0, 0, 300, 300])

    def step(phase):
        launch_bound(device, next(kernels))(phase)

    time_steps(
        step, device=device, warmup=0, steps=5, clock=device.clock, most_covers=1000,
        cover=lambda: (covers.append(None), device.launch(1.0)), after_step=lambda _: covers.append("step"),
    )  # fmt: skip
    told = "".join("c" if each is None else "|" for each in covers)
    assert [len(each) for each in told.split("|")] == [1, 15, 1, 1, 5, 0]


def test_what_follows_a_wait_within_a_step_is_not_covered():
    """10 ms of covering work are waited for, then 1000 launches of 0.01 ms are the host's time in the device's."""
    device = FakeDevice()

    def step(phase):
        device.synchronize()
        launch_bound(device, 1000)(phase)

    timing = time_steps(
        step, device=device, warmup=1, steps=3, clock=device.clock, cover=lambda: device.launch(1.0), most_covers=10
    )
    for sample in timing.samples:
        assert sample.issue_ms == pytest.approx(20, rel=0.01)
        assert sample.ms == pytest.approx(10, rel=0.01)


def launches_then_work(device):
    """5 ms of launches that give the device nothing, then 10 ms for the device."""

    def step(phase):
        with phase("optimizer"):
            for _ in range(500):
                device.launch(0.0)
        with phase("forward"):
            device.launch(10.0)

    return step


def test_a_sustained_window_lets_the_host_run_ahead():
    device, waits = FakeDevice(), []
    wait, device.synchronize = device.synchronize, lambda: (waits.append(device.now_ms), wait())
    apart = time_steps(launches_then_work(device), device=device, warmup=2, steps=20, clock=device.clock)
    assert apart.samples[0].wall_ms == pytest.approx(15, abs=0.1)
    waits.clear()
    timing = time_window(launches_then_work(device), device=device, warmup=2, steps=20, clock=device.clock)
    assert len(waits) == 4, "before and after the warm-up, and the window"
    assert len(timing.samples) == 20
    assert [sample.wall_ms for sample in timing.samples[:2]] == pytest.approx([15, 10], abs=0.1)
    assert {round(sample.wall_ms, 1) for sample in timing.samples[1:]} == {10.0}
    last = timing.samples[19].wait_ms
    assert last == pytest.approx(105, abs=0.3), "the host was done launching after 100 of 205 ms"
    assert sum(sample.wall_ms for sample in timing.samples) == pytest.approx(waits[3] - waits[2] + last, abs=0.1)
    assert timing.samples[5].laps["forward"].ms == pytest.approx(10, abs=0.1)
    assert timing.samples[5].laps["optimizer"].host_ms == pytest.approx(5, abs=0.1)
    assert [sample.wait_ms for sample in timing.samples[:19]] == [0.0] * 19


def test_what_is_done_after_a_step_is_in_a_sustained_window():
    class Host(CpuClock):
        now = 0.0

    device = Host()

    def spend(seconds):
        device.now += seconds

    def step(phase):
        with phase("forward"):
            spend(0.003)

    timing = time_window(
        step, device=device, warmup=0, steps=4, clock=lambda: device.now, after_step=lambda: spend(0.002)
    )
    assert [sample.wall_ms for sample in timing.samples] == pytest.approx([5.0] * 4)
    assert [sample.laps["forward"].ms for sample in timing.samples] == pytest.approx([3.0] * 4)
    assert timing.samples[0].device_ms is None


def test_what_steps_leave_to_others_ends_inside_a_sustained_window():
    device = FakeDevice()
    timing = time_window(
        two_phase_step(device), device=device, warmup=0, steps=3, clock=device.clock, at_end=lambda: device.launch(30.0)
    )
    first, second, last = [sample.wall_ms for sample in timing.samples]
    assert (first, second) == (pytest.approx(60.0, rel=0.01), pytest.approx(60.0, rel=0.01))
    assert last == pytest.approx(90.0, rel=0.01)


def test_as_many_steps_as_announced_and_warmup_kept_apart():
    device, calls = FakeDevice(), []

    def step(phase):
        calls.append(len(calls))
        with phase("forward"):
            device.launch(100.0 if len(calls) == 1 else 1.0)

    seen = []
    timing = time_steps(step, device=device, warmup=2, steps=10, clock=device.clock, after_step=seen.append)
    assert len(calls) == 12
    assert tuple(seen) == timing.steps
    assert len(timing.samples) == 10
    assert timing.first.wall_ms > 100 > max(sample.wall_ms for sample in timing.samples)


def test_a_window_is_what_a_shorter_warmup_would_have_shown():
    device = FakeDevice()
    durations = iter([90.0, 30.0, 1.0, 1.0, 1.0, 1.0])

    def step(phase):
        with phase("forward"):
            device.launch(next(durations))

    timing = time_steps(step, device=device, warmup=3, steps=3, clock=device.clock)
    cold = timing.window(warmup=0, steps=3)
    assert [round(sample.wall_ms) for sample in cold.samples] == [90, 30, 1]
    assert cold.first is timing.first
    assert [round(sample.wall_ms) for sample in timing.window(3, 3).samples] == [1, 1, 1]


def test_a_phase_that_runs_twice_is_an_error():
    device = FakeDevice()

    def step(phase):
        with phase("forward"):
            pass
        with phase("forward"):
            pass

    with pytest.raises(AssertionError, match="twice"):
        time_steps(step, device=device, warmup=0, steps=1, clock=device.clock)


def test_the_real_cpu_clock_sees_a_sleep():
    def step(phase):
        with phase("forward"):
            time.sleep(0.02)

    sample = time_steps(step, device=CpuClock(), warmup=0, steps=1).first
    assert 20 <= sample.laps["forward"].ms <= sample.wall_ms
    assert sample.laps["forward"].device_ms is sample.device_ms is None
    assert sample.ms == sample.wall_ms


def test_device_clock_by_device_type():
    assert isinstance(device_clock(torch.device("cpu")), CpuClock)
    assert isinstance(device_clock(torch.device("cuda")), CudaClock)


@pytest.mark.gpu
def test_gpu_matmul_is_waited_for():
    a = torch.randn(8192, 8192, device="cuda")

    def step(phase):
        with phase("matmul"):
            torch.mm(a, a)

    timing = time_steps(step, device=CudaClock(torch.device("cuda")), warmup=2, steps=5)
    for sample in timing.samples:
        rate = 2 * 8192**3 / sample.wall_ms / 1e9
        assert rate < 2500, "faster than any GPU: the work was not waited for"
        assert sample.laps["matmul"].ms == pytest.approx(sample.wall_ms, rel=0.1)
        assert sample.wait_ms > 0.5 * sample.wall_ms


def test_steps_take_turns_and_every_second_round_is_reversed():
    ran = []
    steps = [lambda phase, name=name: ran.append(name) for name in "ABC"]
    ready = [lambda name=name: ran.append(name.lower()) for name in "ABC"]
    taken = time_in_turns(steps, device=CpuClock(), warmup=1, rounds=2, after_step=ready)
    assert "".join(ran) == "AaBbCcCcBbAaAaBbCc"
    assert [len(each) for each in taken] == [2, 2, 2]


def test_samples_of_steps_in_turns_are_their_own():
    now = [0.0]

    def step(seconds):
        def take(phase):
            now[0] += seconds

        return take

    one, two = time_in_turns(
        [step(1), step(2)], device=CpuClock(), warmup=1, rounds=3, after_step=[lambda: None] * 2, clock=lambda: now[0]
    )
    assert ([each.wall_ms for each in one], [each.wall_ms for each in two]) == ([1000.0] * 3, [2000.0] * 3)
