import pytest
import torch.distributed as dist

from parallel_attn import mesh


@pytest.fixture(autouse=True)
def no_process_group_is_left():
    """A command that fails leaves its process, and with it its group; here the process goes on."""
    before = dist.is_initialized()
    yield
    if dist.is_initialized() and not before:
        mesh.shutdown()
