"""The devices to train on."""

import torch


def resolve_devices(requested: list[str] | None) -> tuple[list[torch.device], list[str]]:
    """Return the devices to train on, and warnings for the log.

    Args:
        requested: names such as "cuda:0" or "cpu"; None for every visible GPU, or the CPU without one.

    Raises:
        ValueError: a device is named twice, or a GPU that is not among those visible.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested is None:
        names = [f"cuda:{index}" for index in range(visible)] or ["cpu"]
        return [torch.device(name) for name in names], []
    # "cuda" is another name of the first GPU.
    devices = [torch.device("cuda:0" if name == "cuda" else name) for name in requested]
    cuda = [device for device in devices if device.type == "cuda"]
    if cuda and not visible:
        return [torch.device("cpu")], [f"devices: {requested} asked for, but CUDA is not available: running on the CPU"]
    if len(set(devices)) < len(devices):
        raise ValueError(f"every device once, got {requested}")
    for device in cuda:
        if device.index >= visible:
            raise ValueError(
                f"{device} asked for, but only {visible} are visible (cuda:0 to cuda:{visible - 1}); indices count "
                "the devices that CUDA_VISIBLE_DEVICES leaves"
            )
    return devices, []


def identity(device: torch.device) -> str:
    """Return a name that is unique on the machine and independent of CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)


def is_out_of_memory(error: BaseException) -> bool:
    """True if a device, or a library on it, ran out of memory; the device is still usable."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # cuBLAS and cuDNN, CUDA outside of PyTorch's allocator, and the CPU's allocator have no type of their own.
    signs = ("_STATUS_ALLOC_FAILED", "out of memory", "can't allocate memory")
    return type(error) in (RuntimeError, torch.AcceleratorError) and any(sign in str(error) for sign in signs)
