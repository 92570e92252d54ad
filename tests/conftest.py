import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    root = Path(os.environ.get("FASTACTREC_DATA", REPO.parent / "shared" / "data"))
    if not root.is_dir():
        pytest.skip("real clips are not here: set FASTACTREC_DATA")
    return root
