"""The words of the story generator: names, animals, and the turns of phrase that many plots share.

Only data stands here; `stories` explains the notation (`[one|other]`, `{slot}`) and puts the words to work.
"""

# Names in lists come from common to rare, and so they do in the stories.
GIRLS = """
    Lily Mia Anna Emma Nora Zoe Lucy Ella Mila Sara Rosa Lena Maya Molly Ruby Daisy Ida Sofia Eva Kate Luna Ivy Nina
    Ada Hana Leila Amy Bella Clara Greta Julia Lina Freya Nadia Zara Priya Meg Tess Ruth Elsa Jenny Cora Asha Vera
    Olga Tara Yara Mei Aya Carmen Cleo Fiona Flora Gina Heidi Ines Jana Josie Kala Kira Lara Lola Lotte Mara Mina
    Nell Paula Petra Pia Rita Sue Thea Uma Wanda Dina Edith Farah Alma
"""

BOYS = """
    Tim Ben Tom Max Sam Leo Jack Noah Finn Adam Paul Oscar Emil Peter Theo Milo Jonah Oliver Henry Felix Eli Omar
    Ali Dan Harry Luca Hugo Otto Toby Simon Jacob David Nico Anton Carlo Kofi Ravi Juan Ian Ted Fred George Ivan Jay
    Joe Karl Levi Mark Martin Matteo Ned Pedro Rico Robin Sven Victor Yusuf Zack Amir Andy Arlo Arun Bruno Diego
    Eric Ezra Frank Hamid Igor Jamal Johan Kenji Louie Malik Marco Bill
"""

# Names for animals, and for boats, stars and snails; any of them may be a "he" or a "she".
ANIMAL_NAMES = """
    Pip Hazel Clover Poppy Bramble Button Willow Rusty Nutmeg Acorn Pepper Fern Tilly Moss Maple Biscuit Dusty Olive
    Scout Tumble Pebble Ginger Copper Bumble Ivy Thistle Toffee Whisker Juniper Rowan Sandy Smudge Twig Woody Dot
    Cocoa Basil Barley Patch Minty Mocha Nib Posy Quill Sage Sorrel Tansy Thimble Velvet Violet Winkle Petal Amber
    Burr Cricket Dandy Flora Fuzzy Heather Jasper Jingle Linden Marble Marigold Oakley Snap Teasel
"""

OBJECT_NAMES = """
    Toot Dash Pip Beep Dot Spot Skip Zip Bubble Puff Tink Sparky Kip Twinkle Blink Flip Rumble Toto Wobble Bobby
    Pogo Fizz Gleam Glimmer Flick Rollo Sandy Tango Bix Koko Momo Pippin Quick Zuzu
"""

# Every one of the animals has paws and walks on land.
CHILD_HOMES = (
    "in a small house by the sea",
    "in a tall house on a quiet street",
    "in a village at the foot of a green hill",
    "on a farm with seven cows",
    "in a little town by a river",
    "in a white house with a big garden",
    "in a red brick house next to a bakery",
    "in a warm little house near the woods",
    "in a busy city full of bicycles",
    "in an old mill beside a stream",
    "in a sunny apartment above a flower shop",
)

ANIMALS = {
    "rabbit": "in a dry burrow under an oak tree",
    "fox": "in a cozy den behind the waterfall",
    "bear": "in a warm cave on the hill",
    "mouse": "in a tiny house under the old barn",
    "squirrel": "in a hollow tree at the edge of the woods",
    "hedgehog": "in a nest of leaves under the hedge",
    "badger": "in a deep den in the quiet woods",
    "otter": "in a cozy den on the river bank",
    "raccoon": "in a hollow log near the pond",
    "mole": "in a neat little tunnel below the meadow",
    "chipmunk": "in a snug hole between two rocks",
    "beaver": "in a house of sticks in the middle of the pond",
}

ELDERS = (("Mom", "girl"), ("Dad", "boy"), ("Grandma", "girl"), ("Grandpa", "boy"))

TRAITS = """
    happy kind curious brave clever funny shy gentle cheerful friendly careful quiet playful sweet smart silly
    helpful quick busy lively polite dreamy thoughtful merry
"""

CHILD_HOBBIES = (
    "to sing",
    "to paint",
    "to build towers",
    "to look at picture books",
    "to splash in puddles",
    "to collect smooth stones",
    "to dance in the kitchen",
    "to draw dragons",
    "to count the birds",
    "to make up songs",
    "to dig holes in the garden",
    "to dress up in old hats",
)

ANIMAL_HOBBIES = (
    "to sing",
    "to roll in the grass",
    "to collect shiny stones",
    "to chase the falling leaves",
    "to climb on logs",
    "to listen to the birds",
    "to smell the flowers",
    "to make up songs",
    "to watch the clouds",
    "to splash in puddles",
    "to jump over sticks",
    "to tell funny stories",
)

# Turns of phrase; "he", "him" and "his" are the hero's. Each use is a choice of its own.
PHRASES = {
    # --- the hero appears
    "once": """[Once upon a time, there was {a trait} little {kind} named {hero}.
        |Once upon a time, {a trait} little {kind} named {hero} lived {home}.
        |There once was a little {kind} called {hero}, who was very {trait}.
        |{hero} was {a trait} little {kind} who lived {home}.
        |{hero} was a little {kind} who loved {hobby}.
        |{Home} lived {a trait} little {kind}. {His} name was {hero}.
        |Not so long ago, {a trait} little {kind} named {hero} lived {home}.
        |Once there was a little {kind} whose name was {hero}. {He} lived {home}.
        |Let me tell you about {hero}, {a trait} little {kind} who loved {hobby}.
        |This is the story of {hero}, {a trait} little {kind}.] {about}""",
    "about": """[|{He} had [brown|soft|dark|red|black|thick] {hair} and [brown|big|bright|dark|green] eyes.
        |{He} lived with {his} [mom and dad|mom and dad and {his} grandma|mom and dad and two big brothers].
        |{His} favorite color was [red|blue|yellow|green|purple|orange].
        |{He} liked [soup|apples|honey|bread|carrots|cake|berries|nuts] better than [anything|any other food].
        |{He} always wore a [red|blue|green|yellow|striped] [scarf|coat|sweater|ribbon].
        |{He} was not very big, but {he} had a [big|kind|brave|warm] heart.
        |{He} had a [loud|funny|big|happy] laugh.
        |{He} liked to ask [questions|why|a hundred questions a day].]""",
    "one_day": """[One day|One [morning|afternoon]|One [sunny|fine|warm|bright|lovely|quiet] [day|morning|afternoon]
        |Then one day|On a [sunny|fine|warm|bright|quiet] [day|morning|afternoon]]""",
    "weather": """[|The sun was shining.|The birds were singing.|The sky was blue.|A soft wind was blowing.
        |White clouds floated by.|The air smelled of [flowers|grass|summer|rain].|There was not a cloud in the sky.
        |The [grass|moss|path] was still wet.]""",
    "passed": """[two|three|some|four|a row of] [white|brown|black|tiny|fat|sleepy|yellow]
        [ducks|goats|butterflies|geese|snails|ladybugs|frogs|sparrows|bees|ants]
        [in the grass|by the fence|under a tree|on a wall|beside the path|near the water|among the flowers]""",
    # --- feelings
    "glad": "[happy|glad|pleased|delighted|full of joy]",
    "proud": "[proud|happy and proud]",
    "sad": "[sad|very sad|unhappy|a little sad]",
    "scared": "[scared|afraid|frightened]",
    "happily": "[happily|with a big smile|with a laugh|cheerfully|with shining eyes]",
    "sadly": "[sadly|in a small voice|with a sigh|with tears in {his} eyes]",
    "softly": "[softly|gently|kindly|in a quiet voice|in a warm voice]",
    "heart": """[|{His} heart beat fast.|{His} heart went thump, thump, thump.|{His} knees shook.
        |{He} hardly dared to breathe.]""",
    "tear": """[|{He} wanted to cry.|A tear rolled down {his} cheek.|{His} lip began to shake.
        |There was a lump in {his} throat.]""",
    "jump_for_joy": """[{hero} jumped up and down|{hero} laughed out loud|{hero} clapped and laughed
        |{hero} danced in a circle|{hero} cheered|{hero} spun around and around]""",
    # --- what people do
    "ran": "[ran|hurried|rushed|raced]",
    "thought": """[{hero} thought for a moment.|{hero} thought and thought.|{hero} sat down to think.
        |{hero} thought about it.|{hero} shut {his} eyes and thought hard.|{hero} scratched {his} head.]""",
    "hugged": """[{elder} gave {him} a [big|warm|long] hug.|{elder} hugged {him} tight.|{elder} put an arm around {him}.
        |{elder} smiled and kissed the top of {his} head.|{elder} pulled {him} close.]""",
    "thanked": """["Thank you, {hero}!"|"Oh, thank you, {hero}!"|"Thank you so much, {hero}!"
        |"You are so kind, {hero}!"]""",
    "learned": """[{hero} learned that|Now {hero} knew that|And {hero} never forgot that
        |From then on, {hero} knew that]""",
    # --- the last lines
    "asleep": """[That night, {hero} dreamed of {dream}.||That night, {hero} fell asleep with a smile on {his} face.
        |That night, {hero} slept well and had sweet dreams.|When the moon came up, {hero} was already fast asleep.
        |In bed that night, {hero} thought about it all and smiled.
        |That night, {hero} was so tired that {he} fell asleep in the middle of a yawn.]""",
    "dream": """[two|three|seven|ten|a hundred] [little|golden|singing|dancing|sleepy|flying|very polite]
        [bears|ducks|fish|cats|frogs|whales|horses|owls|mice|dragons]
        [in a boat|on the moon|in a green field|under a big tree|with tiny hats|on a long train|in the snow]""",
    "friends": """[From that day on, {hero} and {friend} were the best of friends.
        |After that, {hero} and {friend} played together every day.|They were friends from that day on.
        |Then {hero} and {friend} went home side by side, laughing all the way.
        |"I am so glad you are my friend," said {friend}. "Me too," said {hero}.
        |And {hero} and {friend} stayed friends for ever.]""",
}
