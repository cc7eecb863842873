"""What routing records say: load, matching of views, IMED, consistency over epochs, regions."""
