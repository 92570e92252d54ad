"""Fast, trustworthy training of two-stream action-recognition networks.

The public API, loaded on first use so that commands start quickly: see README.md, "Python API".
"""

import importlib
import pkgutil

# Where the source tree shadows the installed package (commands run from a checkout after `pip install .`), the compiled
# extension is found in the installed copy; ops.py refuses one that was built from other C++ sources.
__path__ = pkgutil.extend_path(__path__, __name__)

__version__ = "0.1.0"

_HOMES = {
    "FlatBuckets": "optim.buckets",
    "FusedAdam": "optim.adam",
    "ParameterAverager": "optim.averaging",
    "tvl1": "data.flow",
    "encode_flow": "data.flow",
    "decode_codes": "data.flow",
    "decode_flow": "data.decode",
    "decode_frames": "data.decode",
    "open_pack": "data.pack",
    "open_run": "engine.run_folder",
    "FastactrecError": "errors",
    "InputError": "errors",
    "PackError": "errors",
    "CheckpointError": "errors",
    "DecodeError": "errors",
    "AveragingError": "errors",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604, all of them are strings


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
