"""What is predicted: a family of parts (see base.py). Only this room looks at labels."""
