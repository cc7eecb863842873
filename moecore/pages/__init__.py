"""The old name of ``moecore.parts``, until 0.4."""

import warnings

from moecore.parts import Column as Column
from moecore.parts import Shown as Shown

warnings.warn("moecore.pages is now moecore.parts", DeprecationWarning, stacklevel=2)
