"""What is predicted: a family of parts (base.py). Only this room interprets labels."""
