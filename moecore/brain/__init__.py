"""What only the brain-age study has: correction of predicted ages, their errors, ages of new
volumes, out-of-fold predictions, and the model card.
"""
