"""Names of torch that are not in its public interface, used by this folder."""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
