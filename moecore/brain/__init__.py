"""What only the brain-age study has: corrected ages and their errors, new volumes, model card."""
