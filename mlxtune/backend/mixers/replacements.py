"""The functions and layers of mlx-lm's models that this folder replaces."""

from typing import Any

import mlx.nn as nn

from mlxtune.backend.mixers.convolution import DepthwiseConv1d
from mlxtune.backend.model.replaced import Replacements, subclasses

# By the identity of what is replaced.
FUNCTIONS: dict[int, Any] = {}
KINDS: dict[type, type] = subclasses(DepthwiseConv1d, nn.Conv1d)

MIXERS = Replacements(FUNCTIONS, KINDS)
