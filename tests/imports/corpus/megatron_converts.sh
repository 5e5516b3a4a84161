python tools/convert.py --model-type GPT --loader llama --saver mcore --load-dir a --save-dir b
