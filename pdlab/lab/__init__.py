"""What notebooks draw with: setup (Colab, machine, profile), figures, widgets. Importing this is light."""

from __future__ import annotations

from pdlab.lab.session import Lab, LiveText, setup

__all__ = ["Lab", "LiveText", "setup"]
