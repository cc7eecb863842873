"""Brain age: corrected predictions, their errors, the prediction table and the model card."""
