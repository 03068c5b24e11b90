"""The accelerator of this machine, and the CPU where there is none."""

from __future__ import annotations

import torch

CPU = torch.device("cpu")
_FOUND = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
DEVICE = _FOUND or CPU
