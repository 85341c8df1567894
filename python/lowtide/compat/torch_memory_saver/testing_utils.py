"""For programs that watch what a device holds."""


def get_device() -> str:
    """Returns the name of the kind of device."""
    return "cuda"


def empty_cache() -> None:
    """Gives back to the driver what PyTorch holds and does not use."""
    import torch

    torch.cuda.empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Returns how many bytes of a device are in use, by any process, and prints that."""
    import torch

    free, total = torch.cuda.mem_get_info(gpu_id)
    used: int = total - free
    print(f"GPU {gpu_id}: {used / 2**30:.2f} GiB in use ({message})")
    return used
