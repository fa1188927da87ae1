"""What vision-language-action models share: public folders, statistics, tokenizers, saving."""
