"""Figures and the drawing that they share: charts, heat tables, contact sheets, direct labels."""
