"""How many neighbouring ranks share the fast links: those that NVLink joins, else those of one machine.

Unverified on a GPU; tested against a stand-in for NVML.
"""

from __future__ import annotations

import os

import torch


def ranks_per_island() -> int:
    """Ranks that averaging counts as one node: torchrun's local world size, or less where NVLink joins the GPUs
    of the machine in several groups of one size that hold neighbouring local ranks."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not torch.cuda.is_available() or torch.cuda.device_count() < local:
        return local
    islands = nvlink_islands([_uuid(rank) for rank in range(local)])
    sizes = {len(island) for island in islands}
    neighbours = all(island == list(range(island[0], island[0] + len(island))) for island in islands)
    return sizes.pop() if len(sizes) == 1 and neighbours and len(islands) < local else local


def _uuid(device: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def nvlink_islands(uuids: list[str]) -> list[list[int]]:
    """Indices of GPUs that active NVLinks join, directly or through switches; each GPU alone where NVML does not know.

    Args:
        uuids: as NVML names GPUs, "GPU-...".
    """
    import pynvml

    joined = [{uuid} for uuid in uuids]  # what each GPU reaches: itself, its links' other ends
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [[index] for index in range(len(uuids))]
    try:
        for reached, uuid in zip(joined, uuids, strict=True):
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            reached.add(_text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
            for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
                try:
                    if pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED:
                        reached.add(_text(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
                except pynvml.NVMLError:  # this GPU has no such link
                    break
    finally:
        pynvml.nvmlShutdown()
    islands: list[tuple[set[str], list[int]]] = []
    for index, reached in enumerate(joined):
        touching = [island for island in islands if island[0] & reached]
        members = sorted([index, *(i for island in touching for i in island[1])])
        islands = [island for island in islands if island not in touching]
        islands.append((reached.union(*(island[0] for island in touching)), members))
    return sorted(members for _, members in islands)


def _text(bus_id: str | bytes) -> str:
    return (bus_id.decode() if isinstance(bus_id, bytes) else bus_id).lower()
