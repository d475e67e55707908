"""Reports: views compute what is shown from records alone, text places it on a terminal."""
