"""What every room speaks of: frozen settings, routing records, files and their errors, safetensors,
random streams, ranks.

It knows neither models nor data.
"""
