"""The production door: install a policy in a model, in place and reversibly.

Needs torch and PyYAML and nothing else, so that a training job carries nothing of the tuner.
"""

from autoprec.runtime.install import apply
from autoprec.runtime.precision import Precision

__all__ = ["Precision", "apply"]
