from parallel_attn.interop.architecture import Architecture
from parallel_attn.interop.tensors import Entry
from parallel_attn.interop.translation import Translation, from_hugging_face, to_hugging_face

__all__ = ["Architecture", "Entry", "Translation", "from_hugging_face", "to_hugging_face"]
