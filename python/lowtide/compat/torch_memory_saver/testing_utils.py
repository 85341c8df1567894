"""Functions for tests that check the memory of a device."""


def get_device() -> str:
    """Returns the device type."""
    return "cuda"


def empty_cache() -> None:
    """Releases PyTorch's cached memory to the driver."""
    import torch

    torch.cuda.empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Returns and prints the bytes of a device that are in use by all processes."""
    import torch

    free, total = torch.cuda.mem_get_info(gpu_id)
    used: int = total - free
    print(f"GPU {gpu_id}: {used / 2**30:.2f} GiB in use ({message})")
    return used
