"""moecore: sparse mixture-of-experts models, their training, and what the papers measure."""
