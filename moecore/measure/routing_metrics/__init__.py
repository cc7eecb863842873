"""What routing records say: load, views, IMED, consistency over epochs, regions, galleries."""
