"""What notebooks call: setup, figures, widgets."""
