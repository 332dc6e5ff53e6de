"""What is told of how a job trains: merged over its attempts, and to two digits."""

from msgspec.structs import replace

from swarmsched.estimate import (
    MERGED_POINTS,
    BatchRange,
    Estimate,
    GpuBatch,
    NoisePoint,
    SpeedPoint,
    batches_of,
    coarse,
    merged,
)


def test_points_of_other_sizes_stay_and_those_of_the_same_are_replaced() -> None:
    two = Estimate(points=(SpeedPoint(2, 1, 32, 0.5),), noise=(NoisePoint(64, 3.0),), done=10.0)
    four = merged(two, Estimate(points=(SpeedPoint(4, 2, 16, 0.3),), done=20.0))
    assert [(each.ranks, each.step_s) for each in four.points] == [(2, 0.5), (4, 0.3)]
    assert (four.noise, four.done) == (two.noise, 20.0)
    again = merged(four, Estimate(points=(SpeedPoint(2, 1, 32, 0.6),), done=30.0))
    assert [(each.ranks, each.step_s) for each in again.points] == [(4, 0.3), (2, 0.6)]
    assert merged(None, two) == two


def test_what_others_of_its_kind_measured_is_never_a_jobs_own_word() -> None:
    theirs = (SpeedPoint(1, 1, 64, 0.4), SpeedPoint(2, 1, 32, 0.22))
    prior = Estimate(points=theirs, noise=(NoisePoint(64, 1e15),), is_prior=True, gpu="T4")
    own = Estimate(points=(SpeedPoint(2, 1, 32, 0.25),))
    assert merged(prior, own) == replace(own, gpu="T4")


def test_times_on_another_class_of_gpus_are_dropped_once_the_job_has_left_it() -> None:
    slow = Estimate(points=(SpeedPoint(2, 1, 32, 0.5),), noise=(NoisePoint(64, 3.0),), gpu="T4")
    fast = merged(slow, Estimate(points=(SpeedPoint(4, 2, 16, 0.1),), gpu="A100"))
    assert ([each.ranks for each in fast.points], fast.noise, fast.gpu) == ([4], slow.noise, "A100")
    untold = merged(fast, Estimate(points=(SpeedPoint(2, 1, 32, 0.2),)))
    assert ([each.ranks for each in untold.points], untold.gpu) == ([4, 2], "A100"), "its class may not be known"


def test_only_so_many_sizes_are_remembered() -> None:
    known: Estimate | None = None
    for ranks in range(1, 100):
        known = merged(known, Estimate(points=(SpeedPoint(ranks, 1, 8, 1.0),)))
    assert known is not None
    assert [each.ranks for each in known.points] == list(range(100 - MERGED_POINTS, 100))


def test_the_last_measured_warm_up_stands() -> None:
    first = merged(None, Estimate(done=1.0, warmup_s=12.0))
    assert merged(first, Estimate(done=2.0)).warmup_s == 12.0
    assert merged(first, Estimate(done=2.0, warmup_s=9.0)).warmup_s == 9.0
    assert coarse(Estimate(warmup_s=12.345)).warmup_s == 12.0


def test_few_digits_are_told() -> None:
    told = coarse(Estimate(points=(SpeedPoint(2, 1, 32, 0.12345),), remaining=123_456.0, done=9.99))
    assert (told.points[0].step_s, told.remaining, told.done) == (0.123, 120_000.0, 10.0)


def test_the_small_part_of_a_step_that_computes_does_not_vanish_beside_the_other() -> None:
    (told,) = coarse(Estimate(points=(SpeedPoint(8, 2, 32, 1.2345, 1.2334),))).points
    assert abs(told.step_s - told.sync_s - 0.0011) < 1e-12


def test_a_time_that_is_nearly_the_one_told_before_is_no_news() -> None:
    before = Estimate(points=(SpeedPoint(2, 1, 32, 0.500),))
    assert merged(before, Estimate(points=(SpeedPoint(2, 1, 32, 0.509),))) == before
    (changed,) = merged(before, Estimate(points=(SpeedPoint(2, 1, 32, 0.511),))).points
    assert changed.step_s == 0.511


def test_a_noise_that_is_nearly_the_one_told_before_is_no_news() -> None:
    before = Estimate(noise=(NoisePoint(64, 100.0),))
    for noise, batch, told in ((109.0, 64, 100.0), (91.0, 64, 100.0), (111.0, 64, 111.0), (101.0, 128, 101.0)):
        assert merged(before, Estimate(noise=(NoisePoint(batch, noise),))).noise == (NoisePoint(batch, told),)


def test_a_job_keeps_the_global_batch_that_was_measured_first() -> None:
    assert batches_of(Estimate(points=(SpeedPoint(4, 1, 16, 1.0),))) == BatchRange(64, 64, 1, 64)
    assert batches_of(Estimate(points=(SpeedPoint(2, 1, 2**31, 1.0),))).first == 2**32 - 1
    assert batches_of(Estimate()) == batches_of(None) == BatchRange()
    rounded = (SpeedPoint(3, 1, 21, 1.0), SpeedPoint(2, 1, 32, 1.0), SpeedPoint(1, 1, 32, 1.0))
    assert batches_of(Estimate(points=rounded)).first == 64, "a third of 64 samples is told as 21"


def test_a_limit_of_local_batches_is_that_of_the_gpu_and_the_least_of_several() -> None:
    allowed = BatchRange(256, 512, 8, 64, (GpuBatch("a100", 128), GpuBatch("A100-PCIE-40", 96), GpuBatch("t4", 4)))

    def most(gpu: str) -> int:
        on = allowed.on(gpu)
        assert (on.first, on.most, on.local_least, on.by_gpu) == (256, 512, 8, ())
        return on.local_most

    assert most("NVIDIA A100-SXM4-80GB") == 128, "as the name has it, in capitals or not"
    assert most("NVIDIA A100-PCIE-40GB") == 96, "of two names that it has in it the least"
    assert most("NVIDIA H200") == 64, "all that are not named"
    assert most("NVIDIA A100-SXM4-80GB+NVIDIA H200") == 64, "of a server with several models"
    assert most("") == 64, "where nobody knows"
    assert most("NVIDIA A100-SXM4-80GB+Tesla T4") == 128, "a job gets none that do not hold its least"
    assert allowed.refused_gpus == ("t4",)
    plain = BatchRange(256, 512, 8, 64)
    assert plain.on("Tesla T4") is plain
