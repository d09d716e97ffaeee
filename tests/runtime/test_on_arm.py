"""The runtime's tests on Arm, under emulation: those that do not need torch."""

import re
import subprocess

import pytest
from runtime.arm_python import ROOT, arm_command, unavailable

TESTS = ("text", "scheduling", "costs", "bundle", "test_generation_params.py", "test_machine_cache.py")
OPTIONS = ("-p", "no:cacheprovider", "-p", "no:left_running", "--timeout=600")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_the_runtimes_tests_pass_on_arm() -> None:
    """A fault that only Arm processors show would reach users of Arm servers unnoticed."""
    paths = [f"tests/runtime/{name}" for name in TESTS]
    command, environment = arm_command(["-m", "pytest", *OPTIONS, *paths], ROOT / "build" / "arm")
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    print(f"RESULT arm_tests={passed[1] if passed else 0}")
