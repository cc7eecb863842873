"""The parts of my_study."""
