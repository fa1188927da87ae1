"""Faults that are too small for float32 and must be caught on every processor; faults in threads and in benchmarks."""

from __future__ import annotations

from tests.mutants.fault import Fault

_DIT, _AUTOENCODER = "world_models/backbones/dit.py", "world_models/backbones/autoencoder.py"
_LIMITS = "tests/test_limits.py::test_limits_count_cpu_time"
_THREADS = "tests/recipes/test_threads.py::"
_WRITTEN = "tests/test_benchmarks.py::test_every_row_is_written_when_it_is_there_and_a_budget_ends_what_is_too_slow"
_BACKBONES = "tests/world_models/test_backbones.py::"
_ALONE = f"{_BACKBONES}test_environments_and_frames_have_latents_of_their_own"
_NEIGHBOURS = f"{_BACKBONES}test_a_row_does_not_depend_on_its_neighbours_or_its_place"

FAULTS = (
    Fault(
        "the plain step uses all vector instructions",
        "Makefile",
        "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(PYTEST)",
        "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=SSE41 $(PYTEST)",
        ("tests/test_plain.py::test_torch_obeys",),
    ),
    Fault(
        "a test may wait no longer than it may compute",
        "tests/conftest.py",
        "settings._replace(timeout=HANG * settings.timeout)",
        "settings",
        (f"{_LIMITS}[waiting]",),
    ),
    Fault(
        "a test may compute for as long as it may wait",
        "tests/conftest.py",
        "item.stash[_WATCH] = watch = _Watch(settings.timeout)",
        "item.stash[_WATCH] = watch = _Watch(HANG * settings.timeout)",
        (f"{_LIMITS}[computing]",),
    ),
    Fault(
        "the signal of a test's limit goes to any thread",
        "tests/conftest.py",
        "signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGPROF)",
        "signal.pthread_kill(self.ident or 0, signal.SIGPROF)",
        (f"{_LIMITS}[a thread that computes]",),
    ),
    Fault(
        "the processes of a test may compute for ever",
        "tests/conftest.py",
        "if _children() > item.stash.get(_CHILDREN, math.inf):",
        "if _children() < 0:",
        (f"{_LIMITS}[a process that computes]",),
    ),
    Fault(
        "the autoencoder centres its pictures by one part in a million of the batch's mean",
        _AUTOENCODER,
        "latents: Tensor = self.inward(pictures.flatten(0, -4))",
        "latents: Tensor = self.inward(pictures.flatten(0, -4) - 1e-6 * pictures.flatten(0, -4).mean(0))",
        (_ALONE,),
    ),
    Fault(
        "the decoder reads one part in a million of another latent",
        _AUTOENCODER,
        "pictures: Tensor = self.outward(_unit(latents.flatten(0, -4)))",
        "pictures: Tensor = self.outward(_unit(latents.flatten(0, -4) + 1e-6 * latents.flatten(0, -4).roll(1, 0)))",
        (_ALONE,),
    ),
    Fault(
        "a row of the video model reads one part in a million of its neighbour",
        _DIT,
        "features = self.mix(tokens.transpose(1, 2).flatten(2))",
        "features = self.mix((tokens + 1e-6 * tokens.roll(1, 0)).transpose(1, 2).flatten(2))",
        (_NEIGHBOURS,),
    ),
    Fault(
        "the network learns nothing but its critic, because the warm-up never ends",
        "vla_rl/algorithms/policy_gradient.py",
        "self.iteration += 1",
        "pass",
        ("tests/recipes/test_state_ppo.py::test_it_learns_to_balance",),
    ),
    Fault(
        "a stage that is alone keeps its threads for what runs beside others",
        "vla_rl/training/threads.py",
        "torch.set_num_threads(before)",
        "pass",
        (f"{_THREADS}test_threads_are_given_back_whatever_happens",),
    ),
    Fault(
        "whoever sets OMP_NUM_THREADS does not decide",
        "vla_rl/cli/main.py",
        'if "OMP_NUM_THREADS" not in os.environ:',
        "if True:",
        (f"{_THREADS}test_a_given_number_of_threads_is_kept_everywhere",),
    ),
    Fault(
        "imitation computes with one thread although nothing runs beside it",
        "vla_rl/recipes/imitation.py",
        "with alone():",
        "if True:",
        (f"{_THREADS}test_supervised_stages_are_alone",),
    ),
    Fault(
        "benchmarks are written when all are done",
        "tests/benchmarks/__main__.py",
        'write_json(results, {"machine": machine, "rows": [asdict(row) for row in rows], "missing": missing})',
        'write_json(results, {"machine": machine, "rows": [asdict(row) for row in rows], "missing": missing}) '
        "if number == len(chosen) else None",
        (_WRITTEN,),
    ),
    Fault(
        "a benchmark has no budget",
        "tests/benchmarks/measure.py",
        "timer = threading.Timer(seconds,",
        "timer = threading.Timer(1e6 * seconds,",
        (_WRITTEN,),
    ),
    Fault(
        "Ctrl-C goes on with the next benchmark",
        "tests/benchmarks/__main__.py",
        "if missing.get(name) == INTERRUPTED:",
        "if False:",
        ("tests/test_benchmarks.py::test_what_was_measured_stays_when_the_rest_is_interrupted_or_fails",),
    ),
)
