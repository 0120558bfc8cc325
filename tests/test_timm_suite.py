"""timm's own model tests, from its source distribution on PyPI, run over every architecture of the zoo."""

import os
import re
import subprocess
import sys
import tarfile

import pytest
import timm

# sequences of tokens, not feature maps: as timm's own ViTs, left out of the map-only tests
TOKEN_MODELS = ["lean_vit*"]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_zoo_passes_timms_model_tests(tmp_path):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "timm"]
    subprocess.run([*command, "--dest", str(tmp_path), f"timm=={timm.__version__}"], check=True)
    with tarfile.open(next(tmp_path.glob("timm-*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    tests = next(tmp_path.glob("timm-*/tests"))
    suite = tests / "test_models.py"
    names = "".join(f"    {name!r},\n" for name in TOKEN_MODELS)
    text, count = re.subn(r"(NON_STD_FILTERS = \[\n)", rf"\g<1>{names}", suite.read_text(), count=1)
    assert count == 1
    suite.write_text(text)
    # nothing is downloaded; the two largest ConvNeXts have 25 sets of weights with settings like the tiny one's
    chosen = "lean_ and not pretrained and not (default_cfgs and (convnext_small or convnext_base))"
    command = ["-m", "pytest", "-q", "-p", "lean_arch", "-p", "no:cacheprovider", "tests/test_models.py", "-k", chosen]
    command += ["-n", str(os.cpu_count())]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=tests.parent, env=alone, capture_output=True, text=True)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-3000:]
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed >= 7 * len(timm.list_models("lean_*")), done.stdout[-500:]
