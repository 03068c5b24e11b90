"""How the numbers of a partial update are written: one class per way, found by name."""

from fl_elastic.update.codecs.base import CODECS, Codec
from fl_elastic.update.codecs.bf16 import Bf16
from fl_elastic.update.codecs.int8 import Int8
from fl_elastic.update.codecs.kernel_mean import KernelMean
from fl_elastic.update.codecs.raw import Fp16, Fp32
from fl_elastic.update.codecs.topk import TopK

__all__ = ["CODECS", "Bf16", "Codec", "Fp16", "Fp32", "Int8", "KernelMean", "TopK"]
