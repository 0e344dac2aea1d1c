from parallel_attn.planning.parity import Parity, compare

__all__ = ["Parity", "compare"]
