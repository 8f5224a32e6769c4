"""Settings of the test run: eight simulated CPU devices, a private compilation cache, reproducible hypothesis."""

import os

from train.compilation_cache import MIN_COMPILE_SECONDS, private_cache_folder

# Before jax is imported: it reads both only once. An outer setting wins.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()


if "JAX_COMPILATION_CACHE_DIR" not in os.environ and (_folder := private_cache_folder()):
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_folder)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", str(MIN_COMPILE_SECONDS))

import hypothesis
import pytest

# Compilation makes the first example slow, hence no deadline; derandomised, so that a red run stays red.
hypothesis.settings.register_profile("smmd_jax", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("smmd_jax")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Turn a skip into a failure where SMMD_FORBID_SKIPS names a marker of the test: a green run may not hide it."""
    report = yield
    forbidden = {name for name in os.environ.get("SMMD_FORBID_SKIPS", "").split(",") if name}
    if report.skipped and not hasattr(report, "wasxfail") and forbidden & {mark.name for mark in item.iter_markers()}:
        report.outcome = "failed"
        report.longrepr = f"skipped although SMMD_FORBID_SKIPS names its marker: {report.longrepr}"
    return report
