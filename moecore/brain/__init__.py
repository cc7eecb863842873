"""Brain age: calibration, errors, prediction table and model card of models that predict ages."""
