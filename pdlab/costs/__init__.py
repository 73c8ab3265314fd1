"""FLOPs, bytes, rooflines and step-time estimates, all from counted formulas."""
