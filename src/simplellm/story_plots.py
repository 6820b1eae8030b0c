"""The plots of the story generator: what happens in the stories.

Only data stands here; `stories` explains the notation (`[one|other]`, `{slot}`) and tells the stories. A plot's table
keeps together what belongs together, so that a ball is found where balls roll to and nobody bites into a stone.
"""

from typing import NamedTuple


class Plot(NamedTuple):
    """One plot in all its wordings.

    Attributes:
        title: what it is about, for those who read this file.
        hero: who it is about: "child", "animal", "either" of the two, or "thing" (then the table gives the `kind`).
        table: what varies together. The first line names the columns, each other line is a set of values that fit.
        text: the story; blank lines part the paragraphs.
    """

    title: str
    hero: str
    table: str
    text: str


PLOTS = (
    Plot(
        "the lost toy",
        "child",
        """toy; game; spot
        teddy bear; played doctor with it; in the bathroom, wrapped in a long white bandage
        wooden train; built a tunnel for it; inside the tunnel, under the sofa
        rag doll; shown it the birds outside; on the window sill, behind the curtain
        red ball; rolled it down the hall; between the big boots by the front door
        picture book; read it to the cat; in the basket, under the sleeping cat
        toy boat; taken it into the bath; under a wet towel beside the tub
        stuffed elephant; given it a ride in a cart; in the little cart behind the kitchen door
        toy rocket; flown it to the moon; high up on the shelf, next to the lamp
        knitted monkey; taught it to climb; on the back of a kitchen chair, hanging by one arm
        wooden horse; fed it some hay; in the corner of the barn, beside the real horse
        """,
        """[{once} Best of all, {he} loved {his} {toy}.
        |{hero} had {a toy} that {he} loved more than anything. {He} was {a trait} little {kind}, and where {he} went,
        the {toy} went too.
        |{hero} never went to sleep without {his} {toy}. [{Elder} had given it to {him} on {his} birthday.
        |It was old and one side was worn thin.|It always waited for {him} on the bed.]]

        [But one evening, the {toy} was gone.|One [rainy|gray|windy|cold] morning, {he} could not find it anywhere.
        |"Where is my {toy}?" {he} [cried|called|asked] one evening.]
        {He} looked under the bed. [{He} looked in the toy box.|{He} looked behind the door.|{He} looked in the closet.]
        {He} [even looked|also looked]
        [in the laundry basket|inside {his} rain boots|under the rug|behind the clock]. [There was only an old sock.
        |There was nothing but dust.|It was not there.|No {toy}!] {tear}

        [{elder} came in and sat down on the floor.|{elder} heard {him} and came to help.|{He} went to {elder}.]
        ["Running around will not help," said {elder}.|"Let us think," {elder} said {softly}.
        |"Do not worry," said {elder}.]
        [|¶] ["What did you do with it [last|today]?"|"When did you play with it last?"
        |"Close your eyes. What do you see?"] {thought}
        [First there was breakfast.|First {he} had put on {his} shoes.|In the morning {he} had gone outside.]
        [Then there was lunch.|Then came the nap.|After that {he} had helped in the kitchen.] And then...
        ["I [know|remember]!" {he} [cried|shouted].|{His} eyes grew big.|"Oh!" said {hero}.] {He} had {game}!

        [{hero} {ran} to look.|Off {he} ran, as fast as {his} legs would go.|They went to look together.]
        And there it was, {spot}. ["There you are!" {he} laughed.|"I found you!" cried {hero}.
        |{He} held it close and would not let go.]
        [{learned} it is better to stop and think than to run and cry.|From then on, {he} put the {toy} back on the bed
        every time {he} had played with it.|"Next time I will think first and look second," said {hero}.
        |{elder} laughed too. "A good head finds more than fast feet," {elder.he} said.] {asleep}
        """,
    ),
    Plot(
        "the treat for one",
        "animal",
        """treat; source; taste
        big red apple; It had rolled down the hill from the old apple tree; sweet and crisp
        golden pear; It had dropped from the pear tree into the soft grass; sweet and full of juice
        honey cake; {elder} had baked it that very morning; soft and sweet
        nut pie; {elder} had made it with the last nuts of the fall; warm and crunchy
        round melon; It had grown in the sun beside the garden wall; cool and sweet
        blueberry muffin; {elder} had taken it out of the oven just now; warm and soft
        slice of pumpkin bread; {elder} had saved it just for {him}; soft and full of spice
        bowl of raspberries; {He} had picked them one by one; sweet and a little sour
        """,
        """[{once}|"Mine, all mine!" sang {hero}. {He} was a little {kind}, and {he} was in a very good mood.]
        {one_day}, {he} had {a treat}. {source}.
        [|It smelled wonderful.|{He} could hardly wait to eat it.] ["I will eat it all by myself," {he} said.
        |{He} did not want anyone else to have even a crumb.|So {he} looked for a place where nobody could see {him}.]

        {hero} [sat down behind a bush|hid behind a big rock|sat down under a fern], [took a deep breath,
        |licked {his} lips] and opened {his} mouth. Just then, {friend} the {friend.kind} came along the path.
        [|¶] ["Hello, {hero}!" said {friend}. "My lunch fell in the river. Is there anything to eat here?"
        |"Hello," said {friend}. {friend.His} tummy growled. "Have you seen any food? I have found nothing all day."
        |{friend} looked tired. "My cupboard is empty," {friend.he} said. "Have you seen anything to eat?"]
        [{hero} hid the treat behind {his} back.|{hero} quickly put {his} paws around the treat.
        |{hero} pushed the treat under some leaves.] ["No," {he} said.|"I have not seen any," {he} said, and {he} did
        not look up.|"There is nothing here," said {hero}.] {friend} [nodded|sighed] and walked on, [very slowly
        |with {friend.his} head down|all alone].

        Now {hero} could eat. {He} took a bite. [It should have tasted {taste}, but it did not taste like anything at
        all.|But the bite would not go down.|It did not taste half as good as it smelled.]
        {He} kept thinking of [{friend}'s sad face|{friend}, who was so hungry|how slowly {friend} had walked away].
        [|{thought}] ["Wait!" {he} [called|shouted].|{He} jumped up and ran after {friend}.] "I was not [fair|honest
        |kind]. [I do have something to eat|Look what I have], and [there is enough for two|half of it is for you]."

        So they sat down [in the sun|side by side on a log|in the soft grass] and shared. [Now it tasted {taste}.
        |This time every bite was {taste}.] [|"This is the best {treat} in the world," said {friend}.
        |They licked their paws until nothing was left.]
        [|The next day, {friend} came back with a bag of sweet berries. "Half of them are for you," {friend.he} said.
        |A week later, when {hero} was hungry, {friend} brought {him} hot soup.||]
        [{learned} food tastes better with a friend.|{learned} a small piece that is shared is better than a big piece
        alone.|{hero} never hid {his} food again.] {friends}
        """,
    ),
    Plot(
        "learning something hard",
        "child",
        """skill; fail; advice; success
        ride a bike; the bike wobbled and tipped over into the grass; Look far ahead and not down at your feet; \
            the wheels rolled straight and fast down the path
        skate; {his} feet slid away and {he} sat down with a bump; Bend your knees and take small steps; \
            {he} glided all the way to the other side
        swim; {he} swallowed some water and came up coughing; Lie back and let the water hold you; \
            {he} kicked and paddled from one side to the other
        whistle; only air came out and there was no sound at all; Make your lips small and round and blow gently; \
            a clear, bright sound flew through the air
        tie {his} shoes; the laces came apart again; Make two bunny ears and cross them over; \
            the bow stayed tight and neat
        jump rope; the rope caught on {his} toes; Listen to the rope and jump when it taps the ground; \
            {he} jumped ten times in a row
        catch a ball; the ball bounced off {his} hands and rolled away; \
            Keep your eyes on the ball and make a nest with your hands; \
            the ball landed softly in {his} hands and stayed there
        do a cartwheel; {he} tumbled over like a sack of potatoes; \
            Put down one hand, then the other, and look at the ground; \
            {his} legs flew over {his} head and {he} landed on {his} feet
        write {his} name; the letters fell over each other and one was backward; \
            Go slowly and think of one letter at a time; the whole name stood on the page, neat and straight
        play the flute; it squeaked like a rusty gate; Blow as softly as you would blow on hot soup; \
            a sweet, round note came out
        """,
        """[{once} More than anything, {he} wanted to {skill}.|{hero} wanted to {skill}. All the big children could do
        it, and {he} could not.|"I want to {skill}," said {hero} [at breakfast
        |one morning]. {He} was {a trait} little {kind}, and {he} meant it.]
        [{His} friend {friend} could do it already.|It looked so easy when {friend} did it.
        |{friend} next door made it look easy.] ["I will learn it today," {he} said.|"How hard can it be?" {he} thought.
        |]

        {He} tried once, and {fail}. {He} tried again, and [the same thing happened|it was just as bad
        |it went wrong again]. [{He} tried five times.|{He} tried until {his} face was red.|{He} tried all morning.]
        It [did not work|was no use].
        ["I cannot do it!" {he} [cried|shouted].|"I will never learn it," {he} said {sadly}.
        |{hero} sat down on the ground. "It is too hard for me," {he} said.] {tear}

        [{elder} had seen it all.|{elder} came and sat down next to {him}.|{elder} came over with two cups of lemonade.]
        "When I was little, I [could not do it either|had to try a hundred times
        |cried about it too]," {elder.he} said. "[I will tell you a trick|Here is a secret]. {advice}."
        [|¶] [{hero} wiped {his} nose.|{hero} nodded.|{hero} got up again.] {He} tried, and it was a tiny bit better.
        ["Again!" said {elder}.|"Good!" said {elder}. "Once more."|"Did you see that?" asked {elder}.]
        [The next day {he} tried again, and the day after that.|{He} practiced a little every day.
        |All week long {he} practiced before dinner.]

        And then, [one morning|on Sunday|one day], it happened: {success}! ["I can do it!" {he} shouted.
        |"Look! Look at me!" {he} called.|{jump_for_joy}.] {friend} [clapped|cheered], and {elder} [did too
        |was so {proud}|laughed with joy].
        [{learned} hard things grow easy if you keep trying.|"I only needed to try one more time," said {hero}.
        |"You did not give up," said {elder}. "That is the best trick of all."
        |The next summer, {he} showed a smaller child how to do it. "It takes time," {he} said. "Try again."] {asleep}
        """,
    ),
    Plot(
        "the noise in the night",
        "child",
        """noise; cause
        Tap, tap, tap; a branch of the old tree. The wind was pushing it against the window
        Scratch, scratch; a little gray kitten. It wanted to come in from the cold
        Hoo, hoo; an owl with round yellow eyes. It sat in the tree and looked right at them
        Drip, drip, drop; the faucet in the bathroom. Somebody had not turned it off
        Squeak, squeak; the garden gate. It was swinging to and fro in the wind
        Bump, bump, bump; the dog. He was dreaming, and his tail was hitting the door
        Rustle, rustle; a small hedgehog. It was looking for its supper in the dry leaves
        Flap, flap, flap; a shirt on the line. They had forgotten to bring it in
        Crunch, crunch; the little white pony. She was eating the carrots from the garden
        Click, clack; a toy train under the bed. It had been left on and could not find the way out
        """,
        """[It was late, and the house was dark. {hero}, {a trait} little {kind}, lay in bed with open eyes.
        |{once} One night {he} woke up, and it was very dark.|In the middle of the night, little {hero} woke up.
        |{hero} lay in bed and could not sleep. The [wind|cold wind] was [blowing|singing] around the house.]
        [The moon was behind a cloud.|Everyone was asleep.|There was not a star in the sky.]
        Then {he} heard it. "{noise}!"

        {hero} [sat up|held {his} breath|pulled the blanket up to {his} nose]. {heart} "{noise}!" [There it was again.
        |It was closer now.|It did not stop.]
        [Was it a monster?|Was it a bear?|Was it a ghost?|Could it be a giant?] [{He} thought of big teeth.
        |{He} thought of long green arms.|In the dark, even the chair looked like something with ears.
        |{He} wanted to hide under the pillow.] ["Go away," {he} whispered.|"Who is there?" {he} whispered.
        |{He} put {his} head under the pillow, but {he} could still hear it.]

        [At last {he} called {elder}.|{He} jumped out of bed and ran to {elder}.
        |"{elder}!" {he} called. "There is something here!"] {elder} [did not laugh|listened too
        |lit a small lamp]. ["Shall we go and look together?" {elder.he} asked.
        |"Let us find out what it is," {elder.he} said. "Hold my hand."|"Things are often smaller than they sound," said
        {elder}. "Come with me."]
        [|¶] {hero} was {scared}, but {he} [nodded|took {elder}'s hand|took {his} flashlight]. They [walked on their
        toes|went slowly, step by step|followed the sound]. "{noise}!" [{hero} lifted the light.
        |{elder} held up the light.|They peeked around the corner.]

        It was {cause}. [{hero} began to laugh.|{hero} looked at it, and then {he} laughed out loud.
        |{hero} let out a long breath.] ["And I thought it was a monster!"
        |"You did not scare me," {he} said. "Well, maybe a little."
        |"It was more afraid of us, I think," said {elder} and laughed too.]
        [{elder} tucked {him} in again.|They had some warm milk and went back to bed.
        |Soon {he} was back under the warm blanket.] [{learned} the dark is full of small things, and most of them are
        friendly.|When you look at what scares you, it gets smaller.|"Good night, noise," said {hero}.
        |{learned} being brave means to go and look, even with shaky knees.] [And {he} slept until the sun came up.
        |Then {he} closed {his} eyes and slept.|]
        """,
    ),
    Plot(
        "a rainy day",
        "child",
        """game; build; wild
        a pirate ship; They pushed two chairs together and hung up a sheet for a sail.; \
            They sailed past [ten whales|a whale] and found an island made of pillows.
        a castle; They piled up all the cushions until the walls were as high as their chins.; \
            A dragon came to the gate, but it only wanted [a cookie|some soup].
        a rocket; They painted stars on a big brown box and climbed inside.; \
            They flew twice around the moon and waved to the stars.
        a puppet show; They made puppets out of old socks and gave them buttons for eyes.; \
            The sock wolf sang a silly song and the sock duck danced until its hat fell off.
        a shop; They put spoons, socks and apples in a row and made money out of paper.; \
            {elder} bought three spoons and paid far too much for a sock.
        a zoo; They lined up every toy animal in the house and built cages out of blocks.; \
            The lion ran away and they found him in the soup pot.
        a train; They put all the chairs in a row, and {hero} wore the red cap of a driver.; \
            The train went through a dark tunnel under the table and stopped at the sea.
        a jungle; They hung green scarves from the lamp and put all the plants on the floor.; \
            A tiger hid behind the sofa, and it looked a lot like the cat.
        """,
        """[Rain, rain, rain!|Drip, drop, drip, drop.|It rained all morning.
        |The sky was gray, and the rain ran down the window.] [{hero} stood at the window with a long face.
        |{hero} pressed {his} nose against the cold glass.|Little {hero} sat by the window and sighed.]
        {He} [had wanted to play outside|had wanted to go to the park|had planned to ride {his} bike]
        with {his} friend {friend}.
        Now {friend} [was there with wet shoes|had come over in a big raincoat], and [there was nothing to do
        |nobody could go out|all the fun was gone].

        ["This is the worst day ever," said {hero}.|"I am bored," said {hero}. "Me too," said {friend}.
        |"Bad rain!" said {hero}.] ["What can we do?" asked {friend}.|They looked at the toys, but they did not feel
        like playing with them.|They counted drops on the glass, but soon they were tired of that.]
        [|¶] [{elder} looked up from {elder.his} book.|{elder} put down {elder.his} cup.|{elder} came in with a towel.]
        ["When I was small, rainy days were my favorite," {elder.he} said. "We could go anywhere without going out."
        |"It rains on the roof, but not on your ideas," {elder.he} said.|"This room can be anything," {elder.he} said.
        "What would you like it to be?"]

        [{hero} looked at {friend}. {friend} looked at {hero}.|{thought}|The two children looked around.] "[I know
        |I have an idea]!" said [{hero}|{friend}]. "We can make {game}!" {build}
        [{elder} helped them with the high parts.|It took a long time, and it was a lot of work.
        |{friend} held on while {hero} made it just right.|"It needs a flag," said {friend}, so they made one out of a
        dish towel.] And then it was ready. {wild} [They laughed until their tummies hurt.
        |They shouted and sang, and nobody told them to be quiet.|"Again!" cried {friend}. And they did it all again.]

        [Nobody saw that the rain had stopped.|Suddenly the sun came in through the window.
        |"Look," said {elder}, "the rain is over. You can go out now."] ["Not now!" said {hero}. "We are busy."
        |{hero} and {friend} looked at each other. "Oh," they said. "Can we stay in a little longer?"
        |But the children did not even look up.]
        [When {friend} had to go home, {he} waved for a long time. "I hope it rains tomorrow!" {he} called.
        |After that, {hero} always smiled when it rained.|{learned} a gray day can be full of colors.
        |"This was the best day ever," said {hero}, and {friend} nodded.] {asleep}
        """,
    ),
    Plot(
        "the seed",
        "either",
        """seed; plant; result
        sunflower seed; sunflower; It was taller than {hero}, and its face was as yellow as the sun
        pumpkin seed; pumpkin vine; Under the big leaves lay a pumpkin, so round and heavy that nobody could lift it
        bean; bean plant; It had climbed up a long stick, and it was full of fat green beans
        tomato seed; tomato plant; It was full of red tomatoes that smelled of summer
        carrot seed; carrot; When {he} pulled at the green top, out came the longest orange carrot in the garden
        strawberry seed; strawberry plant; Under every leaf hid a sweet red strawberry
        poppy seed; poppy; It was red and thin as paper, and the bees loved it
        pea; pea plant; It had green pods, and in each pod sat a row of little round peas
        """,
        """[{once} {one_day}, {elder} gave {him} {a seed}.|{elder} put something very small into {hero}'s hand. It was
        {a seed}. {hero} was {a trait} little {kind}, and {he} had never planted anything before.
        |{one_day}, {hero} found {a seed} in {his} pocket. {He} was {a trait} little {kind} and wanted to know
        everything about it.]
        ["What is it for?" {he} asked.|"It is so small," said {hero}.|"Can I eat it?" asked {hero}.]
        ["Put it in the ground and wait," said {elder}.|"Plant it," said {elder}, "and you will see."
        |"There is {a plant} asleep in there," said {elder}.]

        {weather} So {hero} made a hole in the [soft|brown|dark] earth, dropped the seed in, and covered it up. {He}
        [gave it some water|poured water over it from a little can]. Then {he} sat down and waited.
        [Nothing happened.|{He} waited until lunch. Nothing happened.|{He} waited and waited, but there was only dirt.]
        The next day {he} [came back|ran to look], and there was [nothing|still only dirt]. ["Wake up, seed!" {he}
        called.|{He} sang it a song.|{He} told it a story.|{He} read it a poem.] [Still nothing came up.
        |But the seed did not move.|The seed slept on.]

        ["It does not work," {hero} said {sadly}.|"I will dig it up and look," said {hero}.
        |"Maybe it is broken," said {hero}.] ["Wait," said {elder}. "Seeds do not like to be hurried."
        |"It is working where you cannot see it," said {elder}.|"Do not dig," said {elder}. "It needs sun, water and
        time."]
        [|¶] So {hero} watered it [every morning|each day before breakfast]. {He} pulled out the weeds. [When it was
        hot, {he} gave it shade.|When a big snail came, {he} carried it away.
        |When the birds came, {he} chased them off.] It rained, and the sun shone. [And one morning
        |One day, when {he} had almost stopped looking], there was [something tiny and green|a little green tip
        |a small green leaf]. ["It is awake!" {hero} shouted.|{jump_for_joy}.|"{elder}, come and look!" cried {hero}.]

        It grew and grew. By the end of the summer it was a real {plant}. {result}. ["You did that," said {elder}.
        |"I did not do much," said {hero}. "I only waited." "That is the hardest part," said {elder}.
        |{hero} was so {proud} that {he} showed it to everyone.]
        [{His} friend {friend} came to see it, and {hero} gave {friend.him} a seed of {friend.his} own. "Now you must
        wait too," {he} said.|{learned} good things take time.|{He} kept one new seed in a little box for the next
        spring.|{learned} you cannot hurry a seed, but you can take care of it.]
        """,
    ),
    Plot(
        "somebody small needs help",
        "child",
        """creature; trouble; wrong; help; after
        baby bird; It had fallen out of its nest and could not fly; but the nest was much too high; \
            came with a ladder, and {hero} held it steady while the baby bird was put back in the nest; \
            The mother bird sang her best song from the top of the tree
        kitten; It had climbed up a tree and did not dare to come down; but the kitten only climbed higher; \
            came with a ladder and a piece of fish, and {hero} lured the kitten down, step by step; \
            The kitten rubbed its head on {hero}'s leg and purred like a little motor
        turtle; It lay on its back and waved its legs in the air; but it was afraid and pulled in its head; \
            showed {hero} how to slide both hands under the shell and turn it gently over; \
            The turtle put out its head, looked at {hero} for a long time, and walked to the pond
        bee; It had fallen into a bucket and could not get out of the water; but {he} did not want to touch it; \
            found a big leaf, and {hero} pushed it under the bee like a boat; \
            The bee dried its wings in the sun and flew once around {hero}'s head
        duckling; It had slipped through a hole in the fence and could not get back to its mother; \
            but the hole was too small for {his} arm; \
            opened the gate, and {hero} walked behind the duckling, very slowly, all the way to the pond; \
            The mother duck quacked, and the duckling jumped into the water beside her
        puppy; Its leash was wound around a bush, and it could not move; but the knot was too tight; \
            showed {hero} how to loosen the knot, one loop at a time; \
            The puppy licked {hero}'s face from one ear to the other
        frog; It sat at the bottom of a dry hole and could not jump out; but it was too slippery to hold; \
            found a long board, and {hero} put it into the hole like a bridge; \
            The frog hopped up and out and went straight to the wet grass
        hedgehog; Its head was stuck in an empty can; but the hedgehog rolled up into a ball of needles; \
            brought thick gloves, and {hero} held the hedgehog still while the can came off; \
            The hedgehog sniffed the air, sneezed once, and walked off into the hedge
        butterfly; It had flown into the house and was beating its wings against the window; \
            but it flew away from {his} hands; \
            brought a glass and a piece of paper, and {hero} carried the butterfly out to the garden; \
            The butterfly sat on a flower for a moment and then flew up over the roof
        """,
        """[{once}|On the way home, {hero} heard a tiny sound. {He} was {a trait} little {kind}, and {he} always stopped
        to look at small things.|"Did you hear that?" said {hero}. {He} was {a trait} little {kind} with very good
        ears.] {one_day}, {he} [found|saw|came upon] {a creature}. {trouble}. [It looked so {scared}.
        |It looked very tired.|]

        ["Oh, you poor little thing!" said {hero}.|"Do not be afraid," {hero} said {softly}.
        |"I will help you," said {hero}.] {He} tried to help, {wrong}. {He} tried again, but [it was no good
        |that did not work either]. [{friend} came by. "Leave it," {friend.he} said. "Let us play ball." But {hero}
        shook {his} head.|{hero} did not know what to do. But {he} would not leave it alone.
        |"Stay here," said {hero}. "I will be back."]
        [|¶] {thought} "[I am too small to do this alone|I need somebody who knows more than I do]," {he} said. So {he}
        {ran} to get {elder}.

        ["{elder}, come quickly!" {he} called.|"Please come," said {hero}. "Somebody needs us."] {elder} [listened
        |did not ask many questions] and [came at once|put on {elder.his} shoes]. ["You were right to call me,"
        {elder.he} said.|"Slowly," said {elder}. "It does not know that we are friends."
        |"We must be very quiet," said {elder}.] Then {elder.he} {help}.

        [And it worked!|It took some time, but then it was done.|"There you go," {hero} whispered.]
        {after}. ["It is saying thank you," said {elder}.|{hero} waved until {he} could not see it anymore.
        |{hero} was {glad} all the way home.] [{learned} you can be small and still be a big help.
        |{learned} asking for help is a way of helping, too.|"Nobody is too small to be helped," said {elder}, "and
        nobody is too small to help."|"Will it remember me?" asked {hero}. "I think so," said {elder}.] {asleep}
        """,
    ),
    Plot(
        "the new neighbor",
        "child",
        """things; offer; play
        a jar of soap bubbles; Do you want to blow one?; \
            They blew bubbles as big as melons and chased them across the yard
        a box of chalk; Which color do you like?; \
            They drew a long blue river with fish in it, all the way down the street
        a bag of marbles; Do you want to roll one?; \
            They rolled the marbles down a ramp and shouted when one jumped over the edge
        two toy dinosaurs; One of them needs a friend, too.; \
            The dinosaurs stamped through the tall grass and roared at the cat
        a jump rope; Can you hold the other end?; They took turns and counted up to a hundred
        a red ball; Do you like to play catch?; They threw the ball high and low and over the hedge
        a bucket of water and two brushes; Do you want to paint the wall with water?; \
            They painted faces on the wall, and the sun wiped them away again
        a big yellow toy truck; It needs a driver for the other side of the road.; \
            They filled the truck with sand, drove it around the tree, and dumped it out again
        """,
        """[{once} One morning, a moving truck stopped at the house next door.
        |A big truck stood in front of the house next door. {hero}, {a trait} little {kind}, watched from behind the
        fence.|"Somebody is moving in!" called {hero}. {He} was {a trait} little {kind}, and {he} saw everything that
        happened on {his} street.] [|Out came a sofa, six chairs and a lamp.]
        And then a {friend.kind} [got out of a blue car|came around the corner]. {friend.He} looked [at the house
        |at {friend.his} shoes] and did not say a word.

        [The next day, the {friend.kind} sat on the steps all alone.|All afternoon, the new {friend.kind} stood by the
        gate.] {hero} wanted to say hello, but {he} [felt shy|did not know how
        |could not think of the right words]. {He} [walked past the gate three times
        |opened {his} mouth and shut it again|hid behind the hedge]. ["What if {friend.he} does not like me?" {he} asked
        {elder}.|"I do not know what to say," {he} told {elder}.] ["Then do not say much," said {elder}. "Bring
        something to share."|"{friend.He} is wondering the same about you, I think," said {elder}.
        |"You can say hello with your hands," said {elder}. "Show {friend.him} something you like."]

        {thought} Then {he} [fetched|went to get|came back with] {things}. {He} [took a deep breath|counted to three]
        and went [up to the steps|through the gate]. {heart} ["Hello," said {hero} in a very small voice.
        |"Hi. I am {hero}," {he} said.] "{offer}"
        [|¶] The {friend.kind} [looked up|was quiet for a moment|turned red]. Then {friend.he} [smiled|nodded
        |gave a tiny smile]. ["Yes, please," {friend.he} said. "My name is {friend}."
        |"I am {friend}," {friend.he} said. "I did not think that anyone would come."
        |"I am {friend}. I had to leave all my friends behind," {friend.he} said.]

        {play}. [|They played until it was dark.|Nobody felt shy anymore.] ["Will you come again tomorrow?" asked
        {friend}. "Of course," said {hero}.|"I was afraid to talk to you," said {hero}. "I was afraid to talk to you,
        too!" said {friend}, and they both laughed.|"I am glad that you moved here," said {hero}.] [
        |{learned} one small word can be the start of something big.|{learned} shy people can be very good friends.]
        {friends}
        """,
    ),
    Plot(
        "the broken thing",
        "child",
        """thing; accident; mend
        blue vase; {He} kicked a ball in the living room, and it flew right into {a thing}; \
            They glued it together, piece by piece, and put dry flowers in it
        cookie jar; {He} reached up for one more cookie, and down came the {thing}; \
            They painted the pieces and used them for a bird bath in the garden
        flower pot; {He} rode {his} scooter across the porch and hit {a thing}; \
            They put the flower into an old boot, and it looked very happy there
        teapot; {He} played drums with two spoons, and the last beat hit the {thing}; \
            They glued the handle back on, and only a thin line was left
        picture frame; {He} threw a pillow at the wall, and down came {a thing}; \
            They made a new frame out of sticks and shells
        lamp; {He} danced with the broom and spun right into the {thing}; \
            They made a new shade out of yellow paper, and now the light was even warmer
        clock; {He} jumped from the sofa, the floor shook, and the {thing} fell off the wall; \
            They took it to the old clock maker, and soon it said tick and tock again
        big bowl; {He} wore the {thing} as a hat, and it slipped off {his} head; \
            They used the pieces to make a picture on the garden wall
        snow globe; {He} shook it to make a snow storm, a bigger one, and then the biggest, and it flew out of {his} \
            hands; They put the little house from inside on the shelf and put cotton around it for snow
        """,
        """[{once}|"Do not play wild games in the house," {elder} always said. But {hero} was a little {kind} who forgot
        such things.|It was very quiet in the house. Too quiet, for {hero} was a lively little {kind}.]
        {one_day}, {he} forgot to be careful. {accident}. [Crash!|There was a loud crash.|Crack!]
        [Now it lay on the floor in pieces.|{hero} stood very still.|"Oh no," {he} whispered.]
        It was {elder}'s favorite {thing}.

        {heart} [Nobody had seen it.|{elder} was out in the garden.|The house was quiet.]
        Quickly, {hero} [put all the pieces in a bag and hid it under {his} bed|pushed the pieces under the rug
        |hid the pieces behind the sofa]. Soon {elder} came in and looked around. "[That is strange
        |Hm]," {elder.he} said. "Where is my {thing}?"
        [|¶] ["I do not know," said {hero}.|"Maybe the cat took it," said {hero}.
        |"I have not seen it," said {hero}, and {his} ears turned red.] [The words felt heavy.
        |It was not true, and it did not feel good.|The cat looked at {him}, and {hero} looked away.]

        At dinner, {hero} [could not eat|only looked at {his} plate|pushed the peas around and around]. {His} tummy
        [felt full of stones|hurt|was in a knot]. [|Even the pudding did not taste good.
        |When {elder} smiled at {him}, it got worse.] At last {he} [got up|went to {elder}
        |took {elder}'s hand]. ["I have to tell you something," {he} said {sadly}.
        |"It was not the cat," {he} said. "It was nobody else. It was me."|"I broke it," {he} said, "and I hid it, and I
        am so sorry."]

        {elder} was quiet for a moment. ["I am sad about the {thing}," {elder.he} said. "But I am glad that you told
        me."|"Things can break," {elder.he} said. "But I want to believe what you tell me. Thank you for telling the
        truth."|"That was hard to say," said {elder}. "It was brave of you."] {hugged} [
        |At once {hero} felt as light as a feather.|{hero} let out a long breath.]
        The next day, they [sat down together|set to work]. {mend}. [{learned} the truth may be hard to say, but a lie
        is heavier to carry.|{hero} did not play wild games in the house again. Well, almost never.
        |"I like it even better now," said {elder}, and {hero} did too.]
        """,
    ),
    Plot(
        "the race",
        "animal",
        """one; stuck; rescue
        young mole; {other} had a foot caught under a root; lifted the root with a strong stick
        little frog; {other} had fallen into a deep hole; let down a long vine and pulled
        small bird; {other} was tangled in the thorns; bent the thorns back, one by one
        old snail; {other} had rolled into a crack between two stones; pushed the stone aside with both paws
        tiny mouse; {other} was sitting on a rock in the middle of the stream; laid a branch across the water
        baby duck; {other} had lost {other.his} mother and was crying in the reeds; \
            took {other.him} by the wing and called for the mother duck until she came
        green beetle; {other} lay on {other.his} back and could not turn over; rolled {other.him} over with one soft paw
        small turtle; {other} had slid into the mud and could not get out; made a rope of grass and pulled
        """,
        """[It was the day of the big race.|{once} Today was the day of the big race.
        |Everybody in the woods had come to see the big race.] [The track went around the pond, over the hill and back
        to the old oak.|They had to run to the mill and back.|A red ribbon hung between two trees. That was the finish.]
        {weather} {hero} the {kind} had practiced [for weeks|every day|since the spring]. [
        |"This year I will win," {he} said.|{He} wanted to win more than anything.]
        [{friend} the {friend.kind} wanted to win, too.|Only {friend} the {friend.kind} was as fast as {he} was.]

        "Ready, set, go!" [called|cried|shouted] the [old owl|crow|big toad]. [Off they went!|Everyone began to run.
        |Dust flew, and feet drummed on the ground.] {hero} was [fast as the wind|ahead of everyone
        |in front]. [{He} ran past {passed}.|] [{He} was going to win!|{He} could already see the finish.
        |Behind {him}, {friend} got smaller and smaller.]
        [|¶] Then {he} heard a small voice. "Help! Please help me!" It was {other}, {a one}. {stuck}.

        {hero} [slowed down|stopped|looked at the ribbon and looked back]. ["Somebody else will come," {he} thought. But
        nobody else was near.|"I can come back later," {he} thought. But {other} looked so {scared}.|{thought}]
        Then {he} turned around. ["I am coming," said {hero}.|"Do not cry," said {hero}. "I am here."]
        {He} {rescue}. It took a long time. [{friend} ran past them, and then all the others did.
        |One after the other, the runners went by.] {thanked} said {other}.

        [When {hero} came to the finish, the race was long over.|{hero} was the last of all to come to the finish.]
        {friend} had won and [wore a crown of leaves|held a golden nut in {friend.his} paws]. Then {other} [told
        everyone what had happened|called in a loud voice that {hero} had stopped to help]. It got very quiet.
        [{friend} took off the prize and held it out. "This is yours," {friend.he} said. "I ran past. You did not."
        |{friend} walked up to {hero}. "I won the race," {friend.he} said, "but you did something better." And
        {friend.he} broke the prize in two.|The [old owl|crow|big toad] came down. "Anyone can be fast," he said. "Not
        everyone is kind." And all the animals cheered for {hero}.] [|{learned} there are things more important than
        winning.|It was the best race that {hero} had ever lost.]
        """,
    ),
    Plot(
        "the birthday present",
        "either",
        """gift; mishap; rescue
        picture of the garden; But just as it was almost done, {he} bumped into the table and a big drop of blue paint \
            fell in the middle; {He} gave the blue spot two wings and two eyes, and now it was a butterfly
        necklace of shells; But just as it was almost done, the string broke and the shells rolled under the table; \
            {He} put the shells in a glass of water with a candle, and they shone like stars
        clay bowl; But while it dried, one side sank down like a tired ear; \
            {He} gave the low side a beak and the high side a tail, and now it was a bird
        bunch of wild flowers; But by the evening, nearly all the petals had fallen off; \
            {He} picked the petals up and glued them on a card in the shape of a heart
        paper lantern; But just as it was almost done, {he} poked a big hole in one side; \
            {He} cut more holes, all in the shape of stars, and the light fell through them and danced on the wall
        clay cup; But while it dried, the handle broke off; {He} filled the cup with earth and put a tiny daisy in it
        knitted scarf; But there was not enough wool, and it came out very, very short; \
            {He} sewed a button on it and made it a warm band for cold ears
        wooden boat; But just as it was almost done, the mast broke off; \
            {He} turned the boat over, made a round door, and now it was a house for a bird
        box with a lid of colored paper; But the glue was wet, and the cat walked over it; \
            {He} drew a flower around every paw print, until the whole lid was a garden
        """,
        """[Tomorrow was {elder}'s birthday.|{once} The next day was {elder}'s birthday.
        |"Tomorrow is {elder}'s birthday," said {hero}. "I need a present."] {hero} [had no money
        |looked in {his} piggy bank, and it was empty|did not have one coin]. ["Then make something," said {his} friend
        {friend}.|But {he} had two good hands and an idea.|So {he} decided to make something.]
        ["I will make {a gift}," {he} said.|It would be {a gift}, the most beautiful in the world.]

        {He} [shut the door so that nobody could peek|worked in secret behind the shed
        |worked under the kitchen table, where nobody could see {him}]. [{He} worked all afternoon.
        |{He} worked with the tip of {his} tongue sticking out.|{He} did not even stop for lunch.]
        It was going [very well|so well]. {mishap}. [{hero} stared at it.|"Oh no!" cried {hero}.
        |{hero} could not believe it.]

        {tear} ["It is ruined," {he} said.|"Now I have nothing," {he} said.|"It was going to be so beautiful," {he}
        said.] [There was no time to start over.|It was late, and soon it would be bedtime.
        |The sun was already going down.] ["It is not what you wanted," {his} friend {friend} said {softly}. "But maybe
        it wants to be something else."|{His} friend {friend} put {friend.his} head to one side. "Look at it again,"
        {friend.he} said. "What do you see?"]
        [|¶] {hero} [looked again|dried {his} eyes and looked|turned around three times and looked]. And then {he} [had
        an idea|smiled]. {rescue}. ["It is different," said {friend}, "but I like it."
        |"That is even better," said {friend}.|It was not what {he} had planned. It was better.]

        In the morning, {hero} [ran to {elder}'s bed|put it next to {elder}'s cup
        |held it behind {his} back]. "Happy birthday!" {elder} [was quiet for a moment|put on {elder.his} glasses
        |opened {elder.his} eyes wide]. ["I have never had a present like this," {elder.he} said.
        |"Did you make this all by yourself?" {elder.he} asked.|"It is the best present of all," {elder.he} said.]
        {hugged}
        [{learned} a mistake can be the start of something new.|"It went wrong first," said {hero}. "I can see where,"
        said {elder}, "and that is my favorite part."|{learned} a present does not have to be perfect. It has to come
        from the heart.]
        """,
    ),
    Plot(
        "the little engine for small jobs",
        "thing",
        """kind; place; big; job; trouble; deed
        tugboat; in the harbor; the big ships; pulled little boats out of the mud; \
            One night, a thick fog came in, and the biggest ship of all could not find the way; \
            sailed ahead with a bright lamp and led the great ship safely home
        train; at the old station; the fast trains; carried milk and apples to the villages; \
            One winter night, the snow was so deep that the fast trains stood still; \
            pushed through the snow, meter by meter, and brought everyone home
        bus; at the bus stop by the bakery; the long buses; took children to school; \
            One day, a tree fell across the big road and no long bus could pass; \
            took the tiny road through the woods and brought every child to school
        tractor; on the farm on the hill; the huge machines; pulled a cart full of hay; \
            One fall day, it rained and rained, and the huge machines sank in the mud; \
            was light enough to cross the field and saved the potatoes before they got wet
        fire truck; at the fire station; the long red trucks; filled the swimming pool in summer; \
            One hot day, there was smoke in a street so narrow that no long truck could get in; \
            rolled through the narrow street and put out the fire with three big splashes
        airplane; at the edge of the airfield; the big jets; carried letters to the islands; \
            One day, a boy on a tiny island was ill and needed medicine; \
            landed on the short beach, where no jet could land, and brought the medicine just in time
        snow plow; in the shed behind the town hall; the giant plows; kept the path to the school free; \
            One night, the snow closed the path to the hospital, and it was too narrow for a giant; \
            went up the narrow path, left and right and left again, and made it free before morning
        ferry; on the wide river; the white steamers; carried sheep and bicycles across; \
            One spring, the river was so low that the white steamers ran aground; \
            floated over the flat places and brought bread and milk to the other side
        cable car; on the green mountain; the big buses; took children up to the meadow; \
            One day, stones fell on the road, and no bus could reach the village; \
            went up and down all day until everyone in the village had food and wood
        """,
        """[{Place}, there was a little {kind} named {hero}.|{hero} was a little {kind}. {He} lived {place}.
        |Once upon a time, a little {kind} named {hero} lived {place}.] [Every day {he} {job}.
        |{He} {job}, and {he} liked it.] {He} was [red and round|small and blue|yellow, with two round lights
        |green, with one dent in the side].
        [But {big} laughed at {him}.|But {big} were so much larger.|Next to {big}, {he} looked like a toy.]
        ["You are too small to do anything important," they said.|"Out of the way, little one!" they said.
        |"When will you grow up?" they asked.] {hero} [said nothing|felt very small
        |looked down at the ground]. [{He} wished {he} could be big, too.|"I do what I can," {he} said.
        |At night {he} dreamed of doing something great.]

        {trouble}. [Everyone was {scared}.|Nobody knew what to do.|"What shall we do?" people cried.]
        {Big} [could not help|tried, but it was no use|were much too large for that]. ["I can try," said a small voice.
        |"Let me try," said {hero}.|"I am small," said {hero}. "Maybe that is just what we need."] [|¶]
        ["You?" they said.|They almost laughed, but there was no time for laughing.
        |Everybody turned around and looked at {him}.]

        {hero} [was {scared}, but {he} went anyway|took a deep breath|turned on {his} lights]. [It was hard. It was
        cold.|It was a long way.|It was harder than anything {he} had ever done.]
        ["One bit at a time," {he} said to {himself}. "One bit at a time."|Twice {he} almost stopped. Twice {he} went
        on.|"I think about the next bit," {he} told {himself}, "and then about the next."]
        And so the little {kind} {deed}.

        [How the people cheered!|Everybody clapped and called {his} name.|There was such a cheer that the birds flew
        up.] [{Big} were very quiet.|{Big} came to say they were sorry.] ["We laughed at you," they said. "We were
        wrong."|"You did what none of us could do," they said.|"You are small," said the biggest one, "but your heart is
        not."] [{hero} was {proud}, but {he} only said, "Good night. I have work to do in the morning."
        |The next day {hero} went back to work. {He} {job}, as always, but now everyone said good morning to {him}.
        |{learned} being small can be just the right size.|From then on, nobody ever called {him} too small.]
        """,
    ),
    Plot(
        "the small light",
        "thing",
        """kind; place; bright; lost; find
        star; high up in the night sky; the big stars; a sailor who was trying to get home; \
            Just over that star is my village
        firefly; in the tall grass behind the mill; the bright street lamps; a lamb that had strayed from its mother; \
            I can follow that light
        lantern; on a hook beside the barn door; the lights of the town; a boy on his way home through the snow; \
            That must be our barn
        candle; in the window of a house in the woods; the street lamps of the town; \
            an old woman who had lost the path; There is a house, and somebody is awake
        lighthouse; on a rock far out in the sea; the lights of the great city; a fishing boat far from the harbor; \
            Keep left of the light, and we are safe
        glow worm; under a leaf beside the road; the moon and the stars; a family of mice in the dark; \
            There is the way, right by the leaf
        night lamp; beside a bed in the attic; the chandeliers of the castle; a girl who had dreamed of a giant; \
            There is my bed, and there is my bear
        spark; in the fireplace of a cold house; the bonfires on the hills; an old man who could not find any matches; \
            If I bring it a little straw, I shall have a fire
        """,
        """[{Place} there was a little {kind} named {hero}.|There was once a little {kind} {place}. {His} name was
        {hero}.|{hero} was a very small {kind} {place}.] [{His} light was so small that nobody ever noticed it.
        |{He} shone every night, but only a little.|{He} had only a small light, not much more than a spark.]
        [{hero} looked at {bright} and sighed.|"I wish I could shine like {bright}," said {hero}.]
        ["Compared to them, I am nothing," {he} thought.|"Who needs such a little light?" {he} asked.
        |"If I went out, nobody would notice," {he} thought.] [A cricket heard {him}. "Shine anyway," it said.
        |An owl heard {him}. "A light is a light," said the owl.|But {he} kept on shining, because that was what {he}
        was made for.]

        One [dark|cold|stormy] night, [black clouds came up and covered everything|a storm came over the hills
        |the wind rose and it began to rain]. [One after the other, {bright} disappeared.
        |Soon nobody could see {bright}.] Somewhere in the dark there was {lost}. ["Where am I?" came a voice.
        |"Help! I cannot see the way," a voice called.|"Is anybody there?" somebody cried.]

        {hero} heard it. [{He} was so tired, and the wind was so strong.|{His} light shook in the wind.
        |"I am too small," {he} thought. "But there is nobody else."] [{He} held on and shone as hard as {he} could.
        |{He} thought of everything warm {he} knew, and {he} glowed a little brighter.
        |"Here!" {he} called. "Look here!" And {he} shone with all {his} might.]
        [|¶] [For a long time nothing happened.|The night was long.|At first nobody answered.]
        Then the voice said, "[Look! A light!|I see something! A little light!|Is that a light over there?]
        {find}." Step by step, and bit by bit, [the voice came closer|the lost one found the way], until [all was well
        |everyone was safe and warm].

        [In the morning the storm was gone.|The clouds blew away, and the sky was clear again.
        |When the sun came up, {hero} was very tired.] ["Who saved you?" everyone asked. "A little {kind}," was the
        answer. "The smallest light of all."|"Thank you, little light," somebody said.
        |"You were the only one that I could see," said a voice. "Thank you."] {hero} [was so {glad} that {he} blinked
        |smiled all day|did not feel small anymore].
        [{learned} in the dark, even a little light is big.|From then on, {he} never wished to be anything else.
        |{learned} you do not have to be the brightest to be needed.|And if you look out at night, maybe you can see
        {him} shine.]
        """,
    ),
    Plot(
        "lost in the crowd",
        "child",
        """place; sight; helper
        market; a puppy asleep in a basket; the woman who sold apples
        zoo; a baby monkey that made funny faces; the zoo keeper in the green hat
        train station; a big old steam engine; the man behind the ticket window
        fair; a horse with silver ribbons; the man who sold balloons
        big store; a window full of dancing puppets; the lady at the front desk
        museum; the bones of a giant dinosaur; the guard with the shiny buttons
        library; a shelf full of books about pirates; the woman at the long desk
        aquarium; a sea turtle as big as a table; the woman who fed the seals
        """,
        """[{once} One Saturday, {he} went to the {place} with {elder}.|The {place} was full of people. {hero}, {a
        trait} little {kind}, held {elder}'s hand.|"Stay close to me," said {elder} when they came to the {place}.
        {hero}, {a trait} little {kind}, nodded.] [|There was so much to see and hear.
        |There were legs and bags everywhere.]
        Then {hero} saw {sight}. ["Oh!" {he} said, and {he} stopped.|{He} let go of {elder}'s hand, only for a moment.
        |{He} had to look at it from all sides.] When {he} turned around, {elder} was gone.

        ["{elder}?" said {hero}. Nobody answered.|There were many people, but not one of them was {elder}.
        |{He} saw a coat like {elder}'s and pulled at it, but a stranger turned around.] {heart} {hero} [wanted to run
        |began to run, first this way and then that way|wanted to shout, but no sound came out]. [Everything was so big,
        and {he} felt so small.|Everyone was in a hurry, and nobody looked down.|{tear}]
        Then {he} remembered what {elder} had told {him}. "If you get lost, [stop running and ask somebody who works
        there|stay where you are and ask for help|do not run around. Ask a person who works there]."

        So {hero} [wiped {his} eyes|took three deep breaths|stood up straight]
        and went to {helper}. ["Excuse me," {he} said {softly}, "I cannot find my {elder.kind}."
        |"Please," said {hero}, "I am lost. Or maybe my {elder.kind} is lost."
        |"Hello," said {hero}. "I am {hero}, and I have lost my {elder.kind}."] "[We will wait right here
        |Let us call for {elder.him}|You did the right thing]," was the answer. "What does {elder.he} look like?"
        "[Tall, with kind eyes|Like the nicest person here|{elder.He} has a brown coat and always looks for {elder.his}
        keys]," said {hero}.
        [|¶] [|It felt like a year, but it was only a few minutes.|They called over the loudspeaker.]
        And then [{he} heard steps. Fast steps|somebody came running|there was a voice that {he} knew]. "{hero}!"
        [called|cried] {elder}.

        {hugged} [|{elder.His} eyes were wet, too.|"There you are, there you are," said {elder}.]
        ["I did what you told me," said {hero}. "I stopped and I asked."|"I was {scared}," said {hero}, "but I
        remembered what to do."] [|"That was very smart of you," said {elder}.]
        [They looked at {sight} once more, this time together.|{hero} held {elder}'s hand all the way home.
        |On the way home, {hero} did not let go once.] [|{learned} when you are lost, the best thing is to stop and
        ask.]
        """,
    ),
    Plot(
        "wide awake",
        "either",
        """trick; story
        listen to the quiet; Far away a dog barked once. A leaf tapped the roof. The house creaked as if it was lying \
            down, too
        breathe like the sea; In came the wave, and out went the wave. In and out, in and out
        think of one good thing from every hour of the day; \
            There was the warm bread, and the funny hat, and the puddle as big as a pond
        say good night to everything; Good night, nose. Good night, toes. Good night, stars and snails and spoons
        fly over the land like an owl; \
            Below lay the dark woods, and the silver river, and one small window with a light in it
        count the stars in the window; \
            One, two, three, and a tiny one that winked. Four, five, and one behind the branch
        be as heavy as a stone and as soft as moss; \
            First the feet grew heavy, then the knees, then the arms, and at last even the nose
        float on a cloud; The cloud was soft and white. It rocked a little, and it sailed slowly over the hills
        think of a slow, slow train; It rolled past the fields. It rolled past the cows. It rolled into a long, soft \
            tunnel
        """,
        """[It was bedtime, but {hero} was wide awake.|{once} One night {he} could not sleep at all.
        |"I am not tired," said {hero}. "Not one bit." {He} was {a trait} little {kind}, and {he} was standing on {his}
        bed.|The moon was up, and everyone yawned. Everyone but {hero}, {a trait} little {kind}.]
        ["I need a glass of water," {he} said. So {elder} brought {him} a glass of water.
        |"One more story," {he} said. So {elder} read {him} one more story.|"I am hungry," {he} said. So {elder} brought
        {him} half an apple.|"My blanket is crooked," {he} said. So {elder} made it straight.]

        [{hero} turned to the left. {hero} turned to the right.|{He} lay on {his} back. {He} lay on {his} tummy.
        |{He} closed {his} eyes, but they popped open again.] [The pillow was too hot.|The blanket was too short.
        |One foot was too cold.|{His} ear itched.] {He} [counted to twenty|counted sheep], but [that made {him} even
        more awake|the sheep only wanted to play|{he} forgot where {he} was].
        ["{elder}!" {he} called.|"Are you still there?" {he} called.|So {he} got up and went to find {elder}.]
        "I cannot sleep. [My legs want to run|My head is full of thoughts|Sleep has forgotten me]."

        {elder} [sat down on the edge of the bed|came and lay down next to {him}
        |tucked the blanket around {his} feet]. ["You cannot catch sleep," {elder.he} said {softly}. "But if you are
        still, it comes to you."|"Sleep is like a shy cat," {elder.he} said {softly}. "Do not run after it. Sit still,
        and it will come."|"You do not have to sleep," {elder.he} said {softly}. "You only have to rest."]
        [|¶] ["How?" asked {hero}.|"What shall I do?" asked {hero}.|"But how do I rest?" asked {hero}.]
        ["Close your eyes. We will {trick}," said {elder}.|"Let us {trick}," said {elder}. "We will do it together."
        |"When I cannot sleep, I {trick}," said {elder}. "Come, try it with me."]

        So they did. {story}. [{hero} listened to {elder}'s soft voice.|{elder}'s voice grew softer and softer.
        |{hero} felt warm all over.] ["It does not work," {he} [said|murmured], and {he} yawned.
        |"I am still not..." said {hero}.|"Just a little more," {he} whispered.]
        [{He} wanted to say something else, but {he} forgot what it was.|Then {he} sighed, and {his} hand went soft in
        {elder}'s hand.|{His} eyes felt heavy. Very heavy.]
        [{elder} waited a little while.|{elder} leaned over to look.|The moon looked in at the window.]
        {hero} was [fast asleep|asleep at last|asleep, with one arm around the pillow]. ["Good night, little one,"
        {elder} whispered.|{elder} turned off the lamp and went out on tiptoe.
        |And {elder}? {elder.He} had fallen asleep, too.|"Sleep well," whispered {elder}, and closed the door without a
        sound.]
        """,
    ),
    Plot(
        "the recipe that went wrong",
        "either",
        """food; were; mistake; taste; fix
        cookies; were; used the salt instead of the sugar; They were as salty as the sea; \
            They made a new bowl of dough, and this time {hero} tasted the sugar first
        cake; was; forgot to put in the eggs; It was as flat as a plate and fell into crumbs; \
            They put the crumbs into cups with cream and cherries on top
        bread; was; forgot the yeast; It was as hard as a brick; They cut it very thin, toasted it and put honey on it
        pancakes; were; poured in far too much milk; They were as thin as paper and full of holes; \
            They rolled them up with jam inside
        soup; was; dropped the whole pepper pot into it; It was so hot that it made their eyes water; \
            They added potatoes and cream, until it was enough for ten and not too hot
        apple pie; was; took it out of the oven much too late; The top was as black as a boot; \
            They took off the black top and ate the soft apples with a spoon
        blueberry jam; was; left it on the fire too long; It was so thick that the spoon stood up in it; \
            They cut it into squares and called it candy
        lemonade; was; put in the lemons and forgot the sugar; It was so sour that their ears wiggled; \
            They stirred in honey, a whole jar of it, and a handful of ice
        waffles; were; put in vinegar, because the bottle looked like milk; \
            They were so sour that even the dog walked away; They made new ones and sniffed at every bottle first
        """,
        """[{once} {one_day}, {he} wanted to make {food} all by {himself}.|"Today I am the cook," said {hero}. {He} was
        {a trait} little {kind} with a very big apron.|The kitchen was full of flour. In the middle stood {hero}, {a
        trait} little {kind}, with a spoon in {his} hand.] [It was going to be a surprise for {elder}.
        |They were going to have a party.]
        ["I know how to make {food}," {he} said. "I have seen it a hundred times."
        |"Do you need help?" asked {elder}. "No, thank you," said {hero}.|{elder} had shown {him} how to do it, and {he}
        was sure that {he} remembered.]

        {He} [stirred and mixed and hummed a song|worked so hard that there was something sticky on {his} nose
        |did everything very fast]. [{He} did not read the recipe, and so {he}
        |{He} did not look very closely, and so {he}|But {he} was thinking of something else, and {he}] {mistake}. [
        |{He} did not even notice.|Nobody saw it happen.]
        [|¶] At last the {food} {were} ready. [|"Come and try!" {he} called.|{hero} was so {proud}.]
        {His} friend {friend} [came in and sat down|was the first to taste]. [{friend.He} stopped. {friend.His} face
        went strange.|{friend.He} made a face like a frog.|{friend.He} blinked three times and said nothing.]
        ["What is the matter?" asked {hero}.|"Do you not like it?" asked {hero}.] Then {hero} tried, too. {taste}!

        ["Oh no," said {hero}. {tear}|"I spoiled it," {he} said {sadly}.|{hero} wanted to hide under the table.]
        {friend} [drank three glasses of water|coughed and looked at {hero}|looked at {elder}] and then [began to giggle
        |burst out laughing]. {hero} [looked up|was surprised]. Then {he} had to laugh, too. [Even {elder} laughed.
        |They laughed until they had to hold on to the table.]
        ["Every good cook has done that once," said {elder}.|"When I was small, I made a soup that even the pig did not
        want," said {elder}.|"Now you know one thing more than before," said {elder}.] "[Let us see what we can do
        |Come, we can still save the day|Roll up your sleeves]."

        {fix}. [It was good!|It tasted wonderful.|And that was delicious.] [Not a bit was left over.
        |Everyone wanted more.|{friend} ate four helpings.] ["Next time I will read the recipe," said {hero}.
        |"Can we do this again tomorrow?" asked {friend}. "But without the first part."
        |{learned} mistakes are easier to swallow when you laugh about them.
        |{learned} even a mistake can turn out well, if somebody helps you.] {asleep}
        """,
    ),
    Plot(
        "snow",
        "either",
        """build; hat; finder
        snow bear; red hat; a robin was sitting in it. She had no nest to keep her warm
        snowman; old straw hat; two field mice were asleep in it. It was the best bed they had ever had
        snow rabbit; green cap; a squirrel had filled it with nuts for the winter
        snow dragon; blue hat; a little bird with a hurt wing had crept into it
        snow queen; yellow hat; a hedgehog lay in it, rolled up tight. He had come out of bed too early
        snow cat; woolly cap; a tiny kitten was curled up in it, purring
        snow fish; striped hat; a hare was using it as a pillow. He was much too tired to hop home
        snow castle; brown fur cap; five little beetles had crept in. They were all in one corner, close together
        """,
        """[In the morning, the whole world was white.|It had snowed all night.
        |{once} One morning {he} woke up, and everything was white.] ["Snow!" shouted {hero}.
        |"Wake up! It snowed!" cried {hero}.|{hero} ran to the window and gave a shout.]
        [{He} put on {his} boots, {his} scarf and {his} {hat}.|In one minute {he} was dressed, with {his} {hat} on {his}
        head.|{He} forgot {his} breakfast, but not {his} {hat}.] {His} friend {friend} was [already outside
        |waiting at the gate].

        [All morning they built {a build}.|They rolled one ball and then a bigger one, until they had {a build}.
        |"Let us make {a build}!" said {friend}. So they pushed and rolled and patted the snow.] [
        |It had stones for eyes and a stick for a nose.|It had a smile made of red berries.]
        ["It looks cold," said {friend}.|"Something is missing," said {hero}.]
        So {hero} took off {his} {hat} and put it on the cold white head. [Now it was perfect.|"There!" {he} said.
        |It looked very fine.]

        But then [a gust of wind came|the wind came around the corner], and [whoosh
        |hop], off flew the {hat}! It flew [over the fence and across the field|past the well and over the hill
        |up and up, like a bird]. They [ran after it|ran and slid and tumbled after it] until they were out of breath.
        At last they found it under [a fir tree|a hedge|a pile of logs]. But {finder}.

        {hero} [put out {his} hand and then took it back|stood very still]. ["But it is your {hat}," whispered {friend}.
        "I know," said {hero}.|{His} head was cold. But {he} looked at the {hat} for a long time.|{thought}]
        ["You need it more than I do," {he} said {softly}.|"It can stay here until the spring," {he} said.
        |"I have a hood, too," {he} said. "Keep it."]
        [|¶] [On the way home, {friend} pulled {friend.his} scarf over both their heads.
        |At home, {elder} gave them hot cocoa and began to knit a new one.|{elder} heard the story and brought out a new
        one, even warmer.] [|The {build} got a bucket for a hat, and that looked even funnier.
        |The {build} got a pot to wear, and that looked very grand.]
        [A week later the snow melted, but in the spring {hero} found the {hat} on the doorstep, with one small feather
        in it.|{hero}'s ears were cold that day, but {his} heart was warm.|{learned} giving something away can make you
        warm.] {asleep}
        """,
    ),
    Plot(
        "taking turns",
        "either",
        """thing; fun; alone
        swing; It hung under the old tree, and {he} flew so high that {his} toes touched the leaves; \
            there was nobody to push {him}
        red wagon; {He} took it up the hill and rolled down like the wind; there was nobody to pull {him} up again
        seesaw; It stood behind the house and went up and down, up and down; it would not move with only one
        sled; {He} took it to the snowy hill and raced down in a cloud of snow; the sled was so heavy to pull up alone
        raft; {He} put it on the pond and floated among the water lilies; there was nobody to hold the other paddle
        long rope; {He} tied one end to the gate and jumped in time to a song; \
            the knot came loose, and there was nobody to hold the end
        drum; {He} took it to the meadow and went boom, boom, boom until the birds flew up; \
            there was nobody to dance to it
        big ball; {He} took it to the meadow and kicked it as far as the fence; there was nobody to kick it back
        bouncy ball; {He} took it to the yard and bounced right over the flower pots; \
            there was nobody to count how often {he} bounced
        tent; It stood in the garden, and {he} crept in and was a king; \
            there was nobody to be the queen, the cook or the dragon
        """,
        """[{once} {one_day}, {he} got a new {thing}.|{hero} had a new {thing}. {He} was {a trait} little {kind}, and
        {he} had wished for it all year.|"Look what I have!" called {hero}, {a trait} little {kind}. It was a brand new
        {thing}.] {fun}. [It was wonderful!|"Whee!" {he} cried.|{He} did it again and again.]
        [|¶] Soon {his} friend {friend} came along. ["May I have a turn?" asked {friend}.
        |"That looks like fun. Can I try?" asked {friend}.|"Please, can I have a turn, too?" asked {friend}.]

        ["No," said {hero}. "It is mine."|"Not now," said {hero}. "Maybe later."
        |"I just started," said {hero}. "You have to wait."] So {friend} [sat down in the grass and waited
        |waited by the fence]. [{friend.He} waited a long time.|"Is it my turn now?" {friend.he} asked.
        |"Now?" {friend.he} asked.] But {hero} [held on tight|shook {his} head
        |pretended not to hear]. [At last {friend} got up and went away.|When {hero} looked around, {friend} was gone.
        |{friend}'s lip began to shake. Then {friend.he} walked home.]

        ["Now I have it all for myself," said {hero}.|{hero} was {glad}. Now nobody would bother {him}.]
        But [something was wrong|soon it was not so much fun anymore]: {alone}. [{He} laughed, but nobody laughed with
        {him}.|It was very quiet.|{He} called, "Look at me!" But there was nobody to look.]
        ["I was not a good friend," {he} thought.|{He} thought of {friend}, who had waited so long.
        |The {thing} was just as new as before, but now it looked dull.]

        So {he} {ran} to {friend}'s house and [knocked|called at the window]. ["I am sorry," said {hero}. "I should have
        let you have a turn."|"I am sorry," {he} said. "It was mean of me. Will you come back?"
        |"It is no fun without you," {he} said. "I am sorry that I was so selfish."]
        {friend} [looked at {friend.his} feet|did not say anything for a moment]. ["Can I go first?" {friend.he} asked.
        "Yes," said {hero}. "And second, too."|Then {friend.he} smiled. "All right," {friend.he} said.
        |"I was sad," {friend.he} said. "But I am not anymore."]
        [|¶] [They took turns until the sun went down.|They counted to twenty, and then the other one had a turn.
        |First {friend} had a turn, then {hero}, and then they found out how to do it together.]
        [Together it was twice as much fun.|They laughed so much that they fell over.|]
        [{learned} sharing does not make the fun smaller. It makes it bigger.
        |{learned} a friend is better than any {thing}.|] {friends}
        """,
    ),
    Plot(
        "the sandcastle",
        "child",
        """top; helper; she; bring
        white feather; an old fisherman; he; some big stones for a wall
        flag made of seaweed; a girl with a yellow bucket; she; a very good shovel
        pink shell; a boy with a brown dog; he; the dog, who loved to dig
        blue stone; an old lady in a straw hat; she; a parasol and a bag of plums
        star made of sticks; a boy with no front teeth; he; a long wooden board
        red leaf; a man with a sunburned nose; he; two strong arms and a funny song
        crab shell; the man who sold ice cream; he; ten paper cups to shape the towers
        green glass stone; a woman with a big net; she; two flat boards for a bridge
        """,
        """[{once} One summer day, {he} went to the beach with {elder}.|The sea was blue and the sand was hot. {hero},
        {a trait} little {kind}, had a bucket and a shovel and the whole day.
        |"I am going to build the biggest castle in the world," said {hero}. {He} was {a trait} little {kind} with sand
        on {his} knees.]
        {He} [dug and patted|filled {his} bucket again and again|worked without looking up]. [The castle got four towers
        and a gate.|The castle got a wall, a bridge and three tall towers.|Soon there was a castle with a tower as high
        as {his} belly.] On the very top {he} put {a top}. [|"Finished!" {he} said.
        |"A king could live here," said {elder}.]

        But [{he} had not looked at the sea|behind {him}, the tide was coming in]. [|"Watch out!" called {elder}.]
        [Splash|Whoosh]! A [big|huge] wave ran up the beach. When it was gone, [the castle was gone, too
        |there was only a bump in the sand|the towers had melted like sugar]. {tear}
        ["You bad sea!" {hero} shouted.|"All my work!" cried {hero}.|"I will never build anything again," said {hero}.]

        ["The sea does not mean it," said {elder}. "It comes and it goes."|{elder} sat down next to {him}, and together
        they looked at the waves.|"It was a beautiful castle," said {elder}. "And you know how to build it now."]
        [|¶] Then {helper} came along. ["Build it up here, where the sand is dry," {she} said. "And dig a moat."
        |"May I help?" {she} asked. "Two can build more than one."|"A castle needs a good place," {she} said. "The best
        place is a little higher up."] {hero} [wiped {his} face|thought about it
        |sniffed]. Then {he} picked up {his} shovel again, and {his} new friend brought {bring}.

        They worked [until the sun was low|all afternoon|side by side] [and dug a deep moat all around
        |and made the walls as thick as a loaf of bread]. The new castle had [seven towers|nine towers and a harbor
        |a road that went around it three times], and the {top} went on top again. [Then the waves came. They filled the
        moat, but they did not get any farther.|The sea came up to the moat, looked at the castle, and went back.]
        [{learned} what falls down can be built again, and often better.|"I am glad the first one fell down," said
        {hero}. "This one is ours."|{hero} waved good night to the sea. "No hard feelings," {he} said.] {asleep}
        """,
    ),
    Plot(
        "too small to play",
        "thing",
        """kind; others; trouble; deed
        fish; the big fish; One day, the youngest of the big fish swam into a glass jar and could not find the way \
            out; swam in through the narrow neck, took the little one by the fin and showed it the way
        seahorse; the dolphins; One day, a fishing net came down, and a young dolphin was caught in it; \
            slipped through a hole in the net and pulled out the knot that held it shut
        crab; the lobsters; One day, a rock rolled in front of the cave, and a little lobster was shut in; \
            crept through the crack under the rock and dug away the sand until the rock rolled on
        tadpole; the old frogs; One day, a baby frog got stuck between the roots at the bottom of the pond; \
            swam between the roots and pushed from behind until the baby frog popped out
        shrimp; the large prawns; One day, their only pearl fell into a deep, thin crack; \
            slid down into the crack and rolled the pearl up, bit by bit
        fish; the fast fish; One day, a big shell snapped shut with {other}, a young fish, inside; \
            swam through the tiny gap and tickled the shell until it had to sneeze
        water bug; the big beetles; One day, the door of the water spider's house fell shut with {other}, the youngest \
            beetle, inside; dived through the keyhole and pushed the latch up from within
        """,
        """[Deep down in the blue water lived a little {kind} named {hero}.|Once upon a time, there was a tiny {kind}
        named {hero}.|{hero} was {a kind}, and {he} was no bigger than a thumb.
        |There once was a little {kind} called {hero}, who was the smallest of all.]
        [All {he} wanted was to play with {others}.|{He} loved to dance in the sunbeams that fell into the water.
        |{He} knew every stone and every plant for miles around.]
        ["May I play with you?" {he} asked {others} every day.|One morning, {he} asked {others} if {he} could join their
        game.] ["You are too small," they said. "You would only get lost."|"You? We can hardly see you!" they laughed.
        |"Come back when you are bigger," they said.] So {hero} [swam away|hid behind a water plant|went home alone]
        and felt {sad}.

        ["I eat and eat, but I do not grow," {he} told the old turtle.|"Why am I so small?" {he} asked the old snail.
        |"I wish I were as big as a whale," {he} told the old eel.] ["Every size is good for something," was the answer.
        "You will see."|"The sea needs big ones and small ones," was the answer.
        |"One day somebody will need someone just your size," was the answer.] [{hero} did not believe it.
        |{hero} was not so sure.|{hero} thought about that.]

        {trouble}. [Everybody came, but nobody could help.|{Others} pushed and pulled, but it was no use.
        |{Others} swam around in circles and did not know what to do.] ["It is too narrow for us!" they cried.
        |"We are too big!" they cried. "We cannot get in!"|"If only one of us were smaller!" they cried.]
        [|¶] ["I can do it," said {hero}.|"Let me through," said a tiny voice. It was {hero}.
        |{hero} was {scared}, but {he} came out from behind a stone. "I am small," {he} said.] [Everyone turned around.
        |It got very quiet.|They made way for {him}.] {hero} took a deep breath. Then {he} {deed}. [It took a long
        while.|It was dark, and it was hard, but {he} did not give up.|"Just a little more," {he} said to {himself}.]

        ["Hurrah!" everybody shouted.|There was so much cheering that the water bubbled.|And all was well again.]
        ["We were wrong about you," said {others}.|"Please forgive us," said {others}. "We were not nice to you."
        |{Others} bowed down to the little {kind}. "Thank you," they said.] ["Will you play with us now?"
        |"Would you like to play hide and seek with us?"] they asked. {hero} [laughed
        |nodded {happily}]. ["Yes," {he} said, "but I warn you, I am very hard to find."
        |"I thought you would never ask," {he} said.] [And nobody ever found {him} first.
        |{learned} small can be just the right size.|From then on, they never played without {him}.]
        """,
    ),
    Plot(
        "the grumpy neighbor",
        "animal",
        """neighbor; lost; gift; secret
        badger; ball; a bowl of warm soup; had carved a whole shelf of tiny wooden birds
        toad; kite; a jar of honey; could play the fiddle so well that even the crickets stopped to listen
        crow; hoop; a piece of cherry cake; knew all the stories of the woods by heart
        goat; ball; a basket of fresh herbs; grew the most beautiful roses behind the wall
        owl; paper plane; a cup of hot tea; had a long brass tube to look at the moon
        porcupine; wooden top; a bag of roasted nuts; could make whistles out of willow wood
        heron; toy boat; a bowl of berries; had drawn pictures of every bird on the lake
        hare; ball; a loaf of nut bread; knew how to make kites that never fell down
        """,
        """[At the end of the path lived an old {neighbor} who was always grumpy.
        |{once} Next door lived an old {neighbor}, and he was always in a bad mood.
        |Nobody liked to walk past the old {neighbor}'s house. Not even {hero}, {a trait} little {kind}.]
        ["Go away!" the {neighbor} shouted when anyone came near.|The {neighbor} never said good morning and never
        smiled.]

        {one_day}, {hero} the {kind} was playing with {friend} the {friend.kind}, and {hero}'s {lost} flew right [in
        front of the old {neighbor}'s door|into the old {neighbor}'s yard]. ["Leave it there," said {friend}.
        |"Run!" said {friend}.] But {hero} [climbed over the wall|pushed the gate open
        |went up the path on {his} toes]. {heart}
        And then {he} saw the old {neighbor} through the window. [He sat alone at a table with one cup.
        |He sat in his chair and looked at an empty wall.|He was holding an old picture, and a tear ran down his nose.]
        He looked very lonely.

        {hero} took {his} {lost} and went home. ["Maybe he is grumpy because nobody talks to him," {he} told {elder}.
        |"{elder}," {he} asked, "can somebody be grumpy because he is sad?" "Oh yes," said {elder}.
        |"Why does nobody visit him?" {he} asked. {elder} did not know.] The next day {he} [knocked|stood]
        at the old {neighbor}'s door. In {his} paws {he} held {gift}.
        [|¶] "What do you want?" [growled|grumbled] the old {neighbor}. ["Nothing," said {hero}. "I brought you
        something."|"Good morning," said {hero} {softly}. "This is for you."
        |"I thought you might like this," said {hero}.]

        The old {neighbor} [looked at it for a long time|opened his mouth and shut it again
        |did not say a word]. ["For me?" he asked, and something in his face grew soft.|"Come in," he said at last.]
        So they sat down at the little table and shared it. And it turned out that the old {neighbor} {secret}. [
        |"Will you show me?" asked {hero}.|"That is wonderful!" said {hero}.]
        [Soon all the young ones came to visit.|The next time, {hero} brought {friend} along, and then all the others
        came.] [The old {neighbor} still grumbled now and then, but nobody was afraid anymore.
        |He even smiled. It was a little crooked, because he was out of practice.
        |{learned} some hearts are like nuts, hard outside and sweet inside.
        |{learned} behind a loud voice there may be a lonely heart.]
        """,
    ),
    Plot(
        "the one who was different",
        "thing",
        """kind; feature; others; trouble; deed
        elephant; ears that were much too big; elephants; \
            One hot day, the youngest elephant fell ill in the burning sun; \
            stood beside the little one and waved {his} big ears all day long, like two cool fans
        mouse; a voice that was much too loud; mice; One night, the cat came creeping when all the mice were asleep; \
            shouted so loudly that everyone woke up and the cat ran away in fright
        giraffe; a neck that was even longer than the others'; giraffes; \
            One dry summer, all the leaves had been eaten but those at the very top of the trees; \
            reached up to the highest branches and threw leaves down to everyone
        duck; feet that were much too large; ducks; \
            One winter, the pond froze over, and the ducks could not get to the water; \
            stamped on the ice with {his} large feet until it broke
        zebra; stripes that glowed in the dark; zebras; One night, a young zebra ran off and was lost in the dark; \
            walked in front, so that everyone could see the way and find the little one
        sheep; wool that was much too long; sheep; \
            One night it snowed, and three newborn lambs were shaking with cold; \
            lay down beside them and covered all three with {his} long wool
        penguin; one wing that was red; penguins; \
            One day, a white fog came in, and the young penguins could not find their way home; \
            stood on the highest rock and waved {his} red wing until all of them had seen it
        pig; a nose that was much too long; pigs; One day, the smallest piglet slid into a deep, muddy hole; \
            hung {his} long nose down into the hole, so that the piglet could hold on and climb out
        """,
        """[Once upon a time, there was a little {kind} named {hero}, who had {feature}.
        |{hero} was {a kind} like all the others, but {he} had {feature}.|There once was a little {kind} called {hero}.
        {He} was born with {feature}.] [The other {others} laughed and pointed.
        |When {he} came by, the other {others} giggled.|"How funny you look!" said the other {others}.
        |"That is not how {a kind} should be!" said the other {others}.]
        {hero} [tried to hide it|wanted to be like everyone else|felt {sad}]. [{He} stayed behind a bush all day.
        |{He} kept to {himself} and did not play.|{He} only came out when it was dark.] [|¶]
        ["Why am I not like the others?" {he} asked {his} {elder.kind}.|"I wish I were like you," {he} told {his}
        {elder.kind}.] ["You are the way you should be," said {his} {elder.kind}. "You just do not know yet what it is
        good for."|"If all flowers were the same, the meadow would be dull," said {his} {elder.kind}.
        |"I love every bit of you," said {his} {elder.kind}.] {hero} [sighed|was not so sure|tried to believe it].

        {trouble}. [Everyone was {scared}.|Nobody knew what to do.|All the {others} ran this way and that way.]
        ["What shall we do?" they cried.|"Who can help us?" they cried.|"If only somebody had an idea!" they said.]
        {hero} [looked on from behind a bush|heard them]. {heart} ["They will laugh at me," {he} thought. "But I can
        help."|{He} thought of what {his} {elder.kind} had said.|At first {he} did not dare. Then {he} knew what to do.]
        [|¶] So {he} [came out|stepped forward|ran to them] and {deed}. [It took a long time, but {he} did not stop.
        |Nobody laughed now.|{He} did not think about how {he} looked. {He} only thought about the others.]

        [When it was over, everyone was safe.|And so everything was all right again.|How happy they all were!]
        [The other {others} stood around {him} and did not know what to say.
        |Then the oldest of the {others} came up to {him}.] ["We are sorry," they said. "We laughed at the very thing
        that saved us."|"We were foolish," they said. "Will you forgive us?"
        |"What we laughed at was the best thing about you," they said.] {hero} [smiled
        |laughed, and this time they laughed with {him}, not at {him}].
        ["It is all right," {he} said. "I did not know it myself."|"Shall we play?" {he} asked.]
        [{learned} what makes you different can be what makes you special.|From then on, {he} never hid again.
        |And ever after, all the little ones wished they had {feature}, too.
        |{hero} was {proud} of {himself} at last, and so was {his} {elder.kind}.]
        """,
    ),
    Plot(
        "the bridge",
        "animal",
        """goal; stay
        the berry bushes; Nobody could pick berries, and the baskets stayed empty
        the school; The teacher stood on one bank, and the pupils stood on the other
        the mill; There was no flour, and so there was no bread
        Grandma's house; Grandma waved from the window on the other side, all alone
        the market; The carrots were here, and the cheese was there
        the big meadow; Half of the friends lived here, and the other half lived there
        the apple orchard; The apples were ripe, and nobody could pick them
        the doctor's house; Old Mother Goose had a cold and could not go there
        """,
        """[All night long, the storm blew.|{once} One night there was a terrible storm.
        |It rained for three days, and the stream grew into a river.] In the morning, the [old|little wooden]
        bridge was gone. The water had carried it away. [Now nobody could get to {goal}.
        |On the other side was {goal}, and nobody could get there.] {stay}. ["What now?" asked {hero} the {kind}.
        |"We need a new bridge," said {hero} the {kind}.|{hero} the {kind} looked at the brown water and sighed.]

        ["I can do it alone," said {hero}.|{hero} set to work at once, all alone.|First {hero} tried it alone.]
        {He} [pushed a log into the water, but it floated away|laid a long branch across, but it was too short
        |piled up stones, but the river rolled them away]. Then {friend} the {friend.kind} tried. {friend.He} [threw a
        rope across, but there was nobody to catch it|tied sticks together, but the knots came loose
        |carried mud in {friend.his} paws, and it washed right off again]. {other} the {other.kind} tried, too, and
        [fell in with a splash|came back all wet].
        ["It is no use," they said.|They sat down on the bank with long faces.|They were tired and cross.]

        [An old heron had been watching them.|On a stone sat an old frog, who had seen everything.]
        ["Three good builders," he said, "and not one bridge. How strange."|"What can each of you do best?" he asked.
        |"Have you tried it at the same time?" he asked.]
        {thought} ["I am good at carrying," {he} said.|"I am good at pulling," {he} said.]
        ["I can tie the best knots," said {friend}.|"I can measure how long it has to be," said {friend}.]
        ["And I can swim across with a rope," said {other}.|"And I can hold things still," said {other}.] [
        |They looked at each other.|"All together!" they said.]

        So they worked together. ["One, two, three, pull!" they sang.|They sang while they worked, and the work grew
        lighter.|More friends came and brought wood, rope and cookies.] By [evening
        |the time the sun went down], there was a bridge, and it was [twice as strong as the old one
        |so strong that even a bear could dance on it|straight and firm]. {hero} went over first. [It did not even
        shake.|Step, step, step. It held!] [|"Hurrah!" they cried.|They danced on it until the moon came up.]
        [|¶] [{learned} three who work together can do more than three who work alone.
        |They gave it a name: the Bridge of Friends.|"What one cannot do, many can," said {friend}.
        |And when the next storm came, the bridge stood.]
        """,
    ),
    Plot(
        "the first time",
        "child",
        """event; fear; person; nice
        first day of school; that nobody would talk to {him}; the teacher; \
            On {his} chair lay a paper star with {his} name on it, and the {friend.kind} at the next desk offered \
            {him} half a cookie
        visit to the dentist; of the big chair and the bright lamp; the dentist; \
            The chair went up and down like a rocket, and at the end {he} got a mirror with a mouse on the handle
        first haircut; that it would hurt; the barber; \
            The scissors sang snip, snip, and the soft brush tickled {his} neck until {he} laughed
        first night at {friend}'s house; of the strange bed and the strange dark; {friend}'s mother; \
            They made shadow animals on the wall, and there was a lamp in the shape of the moon
        first swimming lesson; of the deep water; the teacher; \
            They blew bubbles, floated like stars, and hunted for rings in the warm water
        first ride on a pony; that the pony would run away with {him}; the groom; \
            The pony was as warm as a stove, and it walked so slowly that {he} could count the daisies
        first time on a boat; that the boat would tip over; the captain; \
            The waves rocked {him} like a cradle, and {he} was allowed to ring the bell
        first time on the stage; that {he} would forget {his} words; the teacher; \
            {friend} stood right beside {him}, and when {he} said the first word, all the others came by themselves
        """,
        """[Tomorrow was {hero}'s {event}. {He} was {a trait} little {kind}, but today {he} did not say much.
        |{once} The next day was {his} {event}.|"I do not want to go," said {hero}. {He} was {a trait} little {kind},
        and tomorrow was {his} {event}.] [{hero} was afraid {fear}.|{He} did not tell anyone, but {he} was afraid
        {fear}.|"What are you thinking about?" asked {elder}. "Nothing," said {hero}. But {he} was afraid {fear}.]
        That [night|evening], [{he} could not eat {his} supper|{he} lay awake for a long time
        |there were butterflies in {his} tummy]. [|{He} hoped that it would rain so hard that everything would be called
        off.|{He} hoped for a tiny cold, just big enough to stay at home.|{He} asked the moon to go slowly, so that
        morning would not come.]

        But morning came. ["I have a tummy ache," said {hero}.|{hero} put on {his} socks very, very slowly.
        |{hero} hid under {his} blanket.] {elder} [sat down next to {him}|looked at {him} for a while
        |knelt down in front of {him}]. ["Are you afraid?" {elder.he} asked. {hero} nodded.
        |"New things feel big," {elder.he} said. "They get smaller when you are in them."
        |"When I was little, I was afraid of that, too," {elder.he} said. "I held on to a button in my pocket."]
        [{elder.He} gave {him} a smooth little stone for {his} pocket. "It knows that you are brave," {elder.he} said.
        |{elder.He} drew a tiny heart on {his} hand. "Look at it when you need me," {elder.he} said.
        |{elder} tied {his} shoes. "You can be brave and afraid at the same time," {elder.he} said.]
        So they went, hand in hand. [On the way they saw {passed}.|]

        At first {hero} [looked at {his} shoes|hid behind {elder}|held on very tight]. Then {person} [came and knelt
        down|smiled at {him}|winked at {him}]. ["You must be {hero}," was the greeting. "I am so glad that you are
        here."|"Hello, {hero}," said a friendly voice. "We have been waiting for you."
        |"Shall I tell you a secret?" asked a friendly voice. "I was afraid the first time, too."] {hero} [looked up
        |gave a very small smile|let go of {elder}'s hand, one finger at a time].
        [|¶] And then everything went quickly. {nice}. [{He} forgot to be afraid.
        |Where had the fear gone? {He} looked for it and could not find it.|It was not bad at all. It was fun!]

        ["How was it?" asked {elder} afterward.|On the way home, {hero} talked the whole time.
        |When it was over, {hero} did not want to leave.] ["Can I do it again tomorrow?" {he} asked.
        |"It was easy," said {hero}. "Well, not at first."|"The worst part was before," said {hero}.]
        [{learned} the first step is the hardest one.|{learned} things you are afraid of can turn out to be fun.
        |The little fear was still in {his} pocket, but now it was asleep.] {asleep}
        """,
    ),
    Plot(
        "one more cookie",
        "child",
        """food; place; number; guest
        cookies; in the blue jar on the shelf; twelve; for the bake sale at school
        strawberries; in the white bowl on the table; twenty; for Grandma's birthday cake
        chocolate eggs; in the basket behind the curtain; ten; for the egg hunt on Sunday
        cherry tarts; on the window sill; eight; for the guests in the afternoon
        lemon drops; in the glass on the piano; thirty; for the party on Saturday
        doughnuts; under the checkered cloth; nine; for the neighbors who had a new baby
        gingerbread stars; on the cold stove; eleven; for the tree in the hall
        peaches; in the basket by the door; seven; for the old lady next door
        """,
        """[{once} One morning, there was a wonderful smell in the kitchen.|It was hard to be good that day. {hero}, {a
        trait} little {kind}, sat in the kitchen and looked up with big eyes.
        |Mmm, what a smell! {hero}, {a trait} little {kind}, followed {his} nose into the kitchen.]
        {Place}, there were {food}, {number} of them. "They are {guest}," said {elder}. "[Please do not touch them
        |Leave them alone until then]." ["I promise," said {hero}.|{hero} nodded.]
        Then {elder} went out [to hang up the wash|to water the beans|to talk to the mailman].

        {hero} [sat on {his} hands|looked out of the window|tried to think of something else]. But [the {food} seemed to
        call {him}|{his} feet walked over all by themselves|{his} nose would not stop smelling]. ["I will only smell
        them," {he} said.|"Just one," {he} thought. "Nobody counts them."] So {he} ate one. It was so good that {he} ate
        another one. [|"Only one more," {he} said.|Then one looked lonely, so {he} ate that one, too.]
        And another, until [almost all of them were gone|there was only one left].

        [{His} tummy grew round and tight like a drum.|{His} tummy growled and grumbled.
        |{His} tummy hurt, and {his} fingers were sticky.] ["Are you ill?" asked {elder}, who came in just then. Then
        {elder.he} saw what was left.|{elder} came back and looked at {hero}, and then {elder.he} looked at the crumbs.
        |When {elder} came back, {hero} did not look up.] [|The clock went tick, tock.
        |{elder} did not shout. That was even worse.]
        [|¶] ["I ate them," {he} said {sadly}. "I broke my promise. I am sorry."
        |"I only wanted one," {he} said. "But one wanted another. I am sorry."
        |{hero} began to cry. "They were not for me," {he} said, "and I ate them anyway."]
        ["Your tummy has told you the rest already," {elder} said. "But what do we do now?"
        |"Thank you for telling me," {elder} said. "How can we make it right?"]

        ["We could get new ones," said {hero}. "I will do the hard work."|"I will help you to make it good," said
        {hero}, "and I do not need one for me."] So {hero} [washed and stirred and swept the floor
        |worked all afternoon], and {he} did not [lick {his} fingers even once
        |take even one crumb]. In the evening there were {number} again, {guest}.
        ["Now that is a promise kept," said {elder}.|"Would you like one?" asked {elder}. "No, thank you," said {hero},
        and they both laughed.] [|{learned} a promise is worth more than something sweet.
        |{learned} too much of a good thing is not good anymore.]
        """,
    ),
    Plot(
        "the treasure map",
        "either",
        """found; sign; treasure; note
        in an old boot; a crooked tree; a box of marbles in all colors; Whoever finds these, play with them and be happy
        in a bottle by the stream; a stone like a sleeping turtle; a silver bell; Ring it when you need a friend
        between the pages of an old book; a pine tree with two tops; a wooden whistle; For those who look closely
        under a loose board; a well with a mossy wall; a tin full of old coins; We were young once, too
        in the pocket of an old coat; a rock shaped like a nose; a little brass compass; \
            So that you always find the way home
        in an empty bird house; a hollow oak; a kite, folded up very small; It has waited a long time for the wind
        behind a loose brick; a bush full of white roses; a music box with a tiny dancer; \
            Wind me up and dance with me
        in an old teapot; a rock with a hole in it; a bag of flower seeds; \
            Plant me, and you will have the best treasure of all
        """,
        """[{once} {one_day}, {he} and {his} friend {friend} found something {found}.
        |"Look at this!" said {hero}, {a trait} little {kind}. {He} and {his} friend {friend} had found a piece of paper
        {found}.|{hero} and {friend} were bored. Then {hero}, {a trait} little {kind}, found something {found}.]
        It was an old map. [It was yellow, and one corner was torn.|Somebody had drawn it with a thick blue pen.
        |There was a dotted line, and at the end of it there was a red cross.] ["A treasure map!" whispered {friend}.
        |"It must be gold!" said {friend}.]
        [|¶] [|They packed a lunch and a little spade.|They took a rope, a spade and two apples.]
        Then they set off. {weather} [On the way they saw {passed}.|]

        First the map said: [ten steps from the gate to the left|across the stream, over the three flat stones
        |through the tall grass to the broken fence]. [|That was easy.|They counted out loud.]
        Then it said: [up the hill, as far as the blackberries|along the wall, until it ends
        |follow the ants]. [That was hard.|They got scratches on their noses.|They got lost and had to start again.]
        ["Maybe there is no treasure," said {friend}, and {friend.he} sat down.
        |"My feet hurt," said {friend}. "Let us go home."|"I think somebody played a joke on us," said {friend}.]
        ["Only a little farther," said {hero}. "Here, have an apple."|"We have come so far," said {hero}. "Give me your
        hand."|"I will carry the spade," said {hero}. "Come on!"]

        [At last they saw it:|And there it was:|Behind the next bend they stopped:]
        {sign}, just as on the map! They dug [and dug|until they were dirty all over]. Then the spade went [clonk
        |tock]. [|"There is something!" cried {friend}.|"Did you hear that?" asked {friend}.]
        They pulled out an old chest, and {hero} lifted the lid.
        [It was not gold.|There was no gold in it.] It was {treasure}, and a note. [{hero} read it slowly
        |They read it together]: "{note}."

        [|"Who hid it, I wonder?" said {friend}.|At home, {elder} looked at the map and smiled, as if {elder.he} knew
        something.|{elder} laughed when {elder.he} saw it. "So you found it at last," {elder.he} said.]
        [|The next day, they put a treasure of their own into the chest and drew a new map.
        |Then they buried the chest again, with {hero}'s best feather and {friend}'s best stone in it, for somebody else
        to find.] [{learned} the best part of a treasure is looking for it with a friend.
        |"The real treasure was today," said {hero}.|They kept the map for ever.] {friends}
        """,
    ),
    Plot(
        "the kite",
        "child",
        """kite; tree; idea; catch
        red kite; the tall oak; shook the tree, but only acorns came down; \
            threw a ball of yarn over the branch and pulled, very gently
        yellow kite; the old chestnut tree; threw a stick, and now the stick was stuck, too; \
            tied a rake to a broom and lifted the string off the branch
        green kite; the apple tree; blew as hard as {friend.he} could, but that did not help; \
            climbed onto the wall and reached up with the longest umbrella in the house
        blue kite; the big pine; threw a shoe, and now the shoe was stuck, too; \
            waited until the wind turned, and pulled the string to the other side
        dragon kite; the poplar; asked the birds to bring it down, but they only sang; \
            put a ladder against the trunk and held it, while the tall postman climbed up
        paper kite; the willow by the pond; jumped up and down under it, but {friend.he} was too short; \
            bent the branch down with a hooked stick until the string came free
        white kite; the tall birch; begged the wind to blow it down, but the wind did not listen; \
            tied two brooms together and pushed it off the twigs, bit by bit
        striped kite; the cherry tree; barked like a dog to scare it, but a kite is not afraid of dogs; \
            stood on an upside-down tub and hooked the tail with an umbrella
        """,
        """[It was a good day for kites.|{once} One windy day, {he} took {his} new {kite} up the hill.
        |The wind was strong, and the clouds were running. "Today it will fly!" said {hero}, {a trait} little {kind}.]
        {hero} [had made the kite with {elder}|had painted the kite {himself}
        |had wished for a kite all year], and {his} friend {friend} came along to [help
        |run with it]. [On the hill there were {passed}.|] [
        |First it fell down. Then it fell down again.|"Run!" shouted {hero}, and {friend} ran.]
        Then the wind took hold of it, and up it went! [It danced in the sky.|It got smaller and smaller.
        |Its tail waved to them.]

        But then [the wind turned|a gust came from the side|the string slipped], and the {kite} [dived down|spun around]
        and landed right in the top of {tree}. ["My kite!" cried {hero}.|"We will never get it down," said {hero}.]
        {tear}
        [|¶] ["Wait, I know what to do," said {friend}.|"Let me try," said {friend}.] {friend.He} {idea}.

        [|"Let us climb up," said {friend}. But the lowest branch was much too high.
        |"It is my fault," said {friend}. "I let go too soon." "No," said {hero}, "it was the wind."
        |"Do not be sad," said {friend}. "Think!"] So they thought. [|They thought so hard that they forgot to be sad.
        |{thought}]
        [Then {hero} snapped {his} fingers.|"I have it!" said {hero}.|"Maybe," said {hero} slowly. "Maybe it will
        work."] {He} ran home and came back with {elder}. [|Together they made a plan.
        |"That is a good plan," said {elder}.] {hero} {catch}. And down came the {kite}!

        [It had a hole in one side, but they mended it with tape.|It was not even torn.
        |Only the tail was a little shorter now.] {jump_for_joy}. [|"Let us go to the big field," said {friend}. "There
        are no trees in the big field."|"Now it is your turn to hold it," {hero} told {friend}.]
        [They flew it until the first star came out.|The wind blew, and this time they held on together.] [
        |{learned} a problem gets smaller when you look at it with a friend.
        |"It only wanted to rest a little," said {hero}.|{learned} it is better to think than to throw things.]
        {friends}
        """,
    ),
    Plot(
        "one wish",
        "either",
        """thing; place; wishes
        smooth white stone; at the bottom of the stream; a mountain of pudding, or a boat, or wings
        silver feather; on the path in the woods; a crown, or a real dragon, or a cake that never ends
        golden acorn; under a heap of leaves; a tree house, or a summer without end, or a flying carpet
        tiny bell; in the grass after the rain; a room full of toys, or a tail like a comet, or a pet whale
        blue shell; on the shore; a ship, or a hundred balloons, or the longest slide in the world
        old coin; between two roots; a bag of candy, or a castle, or a hat that makes you invisible
        red marble; in the sand; a pony, or a river of lemonade, or shoes that jump over houses
        little key; behind a stone; a door to the moon, or a friendly giant, or a bed that can fly
        """,
        """[{once} {one_day}, {he} found {a thing} {place}.|Something shone {place}. {hero}, {a trait} little {kind},
        bent down. It was {a thing}.|{hero} found it {place}. It was {a thing}, and {hero}, {a trait} little {kind}, had
        never seen one like it.] [It was warm, and it hummed a little.|When {he} rubbed it, it began to glow.
        |{He} blew the dust off, and it gave a tiny ring.] ["Thank you for finding me," said a small voice. "You have
        one wish."|"Make a wish," said a small voice. "You only have one, so think well."]

        One wish! {hero} [sat down|did not know what to say|ran all the way home]. {He} thought of {wishes}. [
        |"I must not waste it," {he} said.|{He} almost wished for something silly, but {he} stopped just in time.]
        [So {he} went to ask {his} friend {friend}.|Then {he} went to show it to {his} friend {friend}.]

        But {friend} was not [outside|at the gate|in the garden]. {friend.He} lay in bed. [{friend.His} leg was broken,
        and it hurt.|{friend.He} had been ill for a long time and could not come out to play.
        |{friend.He} had a high fever and did not even smile.] ["I can hear you all playing outside," {friend.he} said.
        "I wish I could come, too."|"Hello, {hero}," {friend.he} said in a thin voice. "Tell me what it is like
        outside."|"The doctor says I must wait until the spring," {friend.he} said. A tear fell on the pillow.]
        {hero} [was very quiet|held {friend}'s hand|swallowed hard].
        [|¶]        {He} [felt the {thing} in {his} pocket|looked at the {thing}
        |turned the {thing} over and over]. [It was {his} only wish. There would never be another one.
        |{He} looked at {friend}'s tired eyes.] Then {he} knew. "I wish," {he} whispered, "that {friend} was well
        again."

        [The {thing} grew bright, and then it went dark.|There was a soft sound, like a bell far away.
        |For a moment nothing happened.] [Then the color came back into {friend}'s face.
        |{friend} sat up and rubbed {friend.his} eyes.] ["I am hungry!" said {friend}.
        |"It does not hurt anymore!" said {friend}.|"How strange," said {friend}. "I feel like running!"] [
        |They ran outside together.|They danced around the room.]
        ["What did you want to show me?" asked {friend}. "Oh," said {hero}, "only this." And now it was just {a thing},
        but {he} kept it all {his} life.|"Did you wish for something?" asked {elder} that night. "Yes," said {hero},
        "and I got it."|{hero} never had a boat or a castle, but {he} had a friend to play with, and that was better.] [
        |{learned} the best wish is one for somebody else.|{hero} had never been so {glad} in {his} life.] {friends}
        """,
    ),
    Plot(
        "the band in the woods",
        "animal",
        """song; time
        a song for the summer party; when the fireflies came out
        a march for the mayor's birthday; in front of the town hall
        a dance for the harvest feast; in the big barn
        a song to wake up the spring; on the last day of winter
        a lullaby for the new baby owls; under the old oak
        a welcome song for the geese; on the shore of the lake
        a birthday song for the old turtle; on the first of May
        a song for the wedding of the swans; by the quiet pond
        """,
        """[{hero} the {kind} had a drum.|{once} {He} had a drum, and {he} was very good at it.
        |"Boom, boom, boom!" That was {hero}, a little {kind}, with {his} new drum.]
        {friend} the {friend.kind} had a [flute|fiddle|horn]. {other} the {other.kind} had [a bell|a big double bass
        |an old guitar]. ["Let us be a band!" said {hero}.|"If we play together, we will be a band," said {friend}.]
        They wanted to play {song}, {time}. [|"That will be easy," said {hero}.]

        ["One, two, three, go!" said {hero}.|The next day they began.] {hero} played loud, so that everyone could hear
        {him}. So {friend} played louder. And {other} played louder still. [It sounded like pots falling down the
        stairs.|It was a terrible noise.|It sounded like a cart full of cats.|"Is somebody hurt?" called an old badger.]
        ["You are too loud!" said {friend} to {hero}. "No, you are too fast!" said {hero}.
        |"It is your fault!" they told each other.] [{other} sat down on a stone and would not play anymore.
        |They went home without saying goodbye.|They turned their backs on each other.]

        That evening, {hero} sat [in front of {his} home|alone by the stream
        |on the hill]. It was quiet. Then {he} began to hear things. [The crickets sang, first one and then the next.
        |The leaves whispered, and then they were still.|The wind hummed softly.] [Each one left room for the others.
        |They were taking turns!|They were listening to each other.] ["So that is how they do it," said {hero}.
        |And then {hero} understood.]

        In the morning {he} {ran} to {friend} and {other}. ["I am sorry," {he} said. "I only listened to myself."
        |"I know what we did wrong," {he} said. "Nobody listened."|"Let us try again," {he} said, "but this time with
        our ears."] So {hero} drummed very softly. [|Boom, boom.|Like a heart.] {friend} came in [high and sweet
        |light as a bird]. {other} waited, waited, and played [just at the right place
        |one low, round note]. It was music!
        [|¶] [And so they played {song}, {time}, and everyone danced.|{Time}, they played it for everyone, and nobody
        wanted them to stop.] [|"How did you learn that?" asked {elder}. "We learned to be quiet," said {hero}.
        |"Again!" everybody cried. "Again!"] [|{learned} you have to listen if you want to play together.
        |Of all the sounds, {hero} liked best the one they made together.]
        """,
    ),
    Plot(
        "the loose tooth",
        "child",
        """try; falls
        bit into a carrot, but only the carrot broke; bit into a soft, ripe peach
        wiggled it with {his} tongue all day, but it held on; sneezed a very big sneeze
        tied a string to it, but then {he} did not dare to pull; laughed out loud at one of {friend}'s jokes
        ate three apples, but the tooth stayed where it was; sang the highest note of the song
        asked it nicely to come out, but the tooth did not listen; brushed {his} teeth before bed
        jumped up and down on one leg, but it only wiggled; said the word "thistle"
        pushed it with {his} thumb, but it only leaned to the other side; yawned the biggest yawn of the day
        chewed on a crust of bread, but the tooth did not mind; shouted "Hurrah!" at the ball game
        """,
        """[{hero} had a loose tooth.|{once} One morning, something in {his} mouth wiggled.
        |"Look!" said {hero} at breakfast. "It wiggles!"] [It was at the very front, and it wiggled back and forth.
        |It was a small white tooth, and it was {his} first loose one.|When {he} pushed it with {his} tongue, it tipped
        like a little gate.] {His} friend {friend} had already lost [two teeth
        |three teeth]. ["It does not hurt," said {friend}. "It goes pop."|"You will get a hole, and you can whistle
        through it," said {friend}.|"When it comes out, you are big," said {friend}.]
        [But {hero} was also a little {scared}.|{hero} could hardly wait.|{hero} hoped that it would be today.]

        {He} {try}. [{He} waited for one day and then another.|On Monday it was still there. On Tuesday, too.
        |It hung by a thread, but it hung on.] ["Shall I pull it?" asked {elder}. "No!" cried {hero} and held {his} hand
        over {his} mouth.|"Leave it alone," said {elder}. "It will come when it is ready."
        |"Maybe it likes it in there," said {elder}.] ["But when is it ready?" asked {hero}.
        |"I have waited for a hundred years," said {hero}.|{hero} looked in the mirror and sighed.]

        And then, when {he} was not thinking of it at all, {he} {falls}. Plop! [Something small and white fell down.
        |Something rolled across the floor.|Something was different.] ["My tooth!" {he} shouted.
        |{He} felt with {his} tongue. There was a hole!] But where was it? {hero} got down on {his} hands and knees, and
        so did {elder} and {friend}. [They looked under the table and under the rug.
        |They found a button, a bean and a dead fly.|They found a marble that had been lost since the summer.]
        [|¶] ["Stop!" said {friend}. "Nobody move! There, by your foot!"|Then the cat began to play with something. It
        was the tooth!|And then {elder} laughed. "What is that in your sleeve?" {elder.he} asked.]
        ["It looked bigger in my mouth," said {hero}.|"Now I am big," said {hero}.
        |"Thank you for all the chewing," {hero} told the tooth.]

        [That night, {he} put it under {his} pillow, and in the morning there was a shiny coin.
        |{He} put it in a matchbox with some cotton, so that it could sleep.
        |{elder} gave {him} a tiny box for it, with a star on the lid.] [When {he} smiled, there was a window in {his}
        smile.|All day long {he} whistled through the hole.|And when {he} said "sister," it sounded like the wind.]
        ["Look," {he} said the next week. "The new one is coming!"|{learned} some things come when they are ready, and
        not before.|"Which one is next?" asked {hero}.|]
        """,
    ),
    Plot(
        "the slow messenger",
        "thing",
        """kind; letter; to; hurry
        snail; letter; the queen of the bees; the beetle and the grasshopper
        tortoise; invitation; the old elephant; the hare and the horse
        caterpillar; leaf with a message; the king of the ants; the wasp and the cricket
        beetle; tiny parcel; the mouse on the hill; the dragonfly and the lizard
        worm; message; the mole in the far meadow; the frog and the squirrel
        ladybug with a hurt wing; birthday card; the old toad by the lake; the bee and the swallow
        hedgehog; song book; the nightingale on the far side of the woods; the fox and the deer
        """,
        """[Once there was {a kind} named {hero}, who was very, very slow.|{hero} was {a kind}, and nobody was slower
        than {he} was.|This is the story of {hero}, the slowest {kind} in the land.]
        ["Good morning," {he} said, and when {he} had finished saying it, it was noon.
        |When the others had eaten, {he} was just sitting down.|{He} never ran, and {he} never hurried.]
        But {he} [never forgot anything|always did what {he} said|saw every flower along the way].
        {one_day}, somebody had to take {a letter} to {to}. It had to be there by Sunday. "We will do it!" said {hurry}.
        "We are fast!" ["I can take it, too," said {hero}.|"May I try?" asked {hero}.] How they laughed!

        So the first one took it and hurried off. [But on the way there was a party, and the {letter} was forgotten
        under a chair.|But after the first hill {other.he} lay down for a nap and did not wake up.
        |But {other.he} was so fast that {other.he} went the wrong way.] The second one [stopped to show off and dropped
        it in the mud|got hungry and stayed among the berries|wanted to take the short way and got stuck in the reeds
        |was scared of the rain and hid]. Now it was Friday, and nothing had been done. "I can," said {hero}.

        {He} put the {letter} on {his} back and set off. [{He} passed {passed}.|] [It rained. {hero} went on.
        |It grew dark. {hero} followed the moon.|It rained, and it grew dark. {hero} went on.]
        [There was a stone as big as a house, and {he} went around it.|There was a puddle as wide as a sea, and {he}
        crossed it on a leaf.|There was a wall, and {he} went up, and {he} went down.]
        ["Are you not there yet?" called a bird. "Not yet," said {hero}, "but I am closer than before."
        |"Stop and play," said the grasses. "Later," said {hero}.|{He} was tired, and {his} tummy was empty. "Every step
        is one step less," {he} said.]

        And on Sunday morning, just as the sun came up, {he} was there. ["{A letter} for you," {he} said, and {he} was
        hardly out of breath.|"Here I am," said {hero}. "And here it is."] ["You must be very fast," said everybody.
        "No," said {hero}. "I just did not stop."|"I waited for somebody I could trust," was the answer, "and it was
        you."] [|{hero} was given a golden ribbon and a ride home.|{hero} was given a cup of dew and a soft bed for the
        night.]
        [|¶] [{learned} you do not have to be fast if you keep going.|From then on, everyone brought their letters to
        {hero}.|And those who had laughed did not laugh anymore.]
        """,
    ),
    Plot(
        "the new baby",
        "child",
        """baby; bring; help
        sister; drew a picture of the whole family, with the baby in the middle; sang the song about the three ducks
        brother; gave the baby {his} own old bear; made a face like a fish
        sister; gave the baby {his} yellow blanket with the stars; rocked the cradle and hummed
        brother; made a chain of paper birds to hang over the cradle; danced with a spoon on {his} nose
        sister; told the baby the names of all the animals in the book; \
            held out one finger, and the tiny hand closed around it
        brother; built a tower of blocks for the baby to look at; whispered something in the tiny ear
        """,
        """[Everything was different now, because {hero} had a new baby {baby}.
        |{once} One day, Mom and Dad came home with a baby {baby}.|{hero} had a new baby {baby}. {hero} was {a trait}
        little {kind}, and {he} had wished for somebody to play with.] [But the baby could not play at all.
        |The baby had no teeth and no hair.|"When can we play?" asked {hero}.]
        The baby [slept all day and cried all night|drank milk, slept, and cried], and everyone had to [whisper
        |walk on tiptoe]. [|"Not now, {hero}," said Mom. "The baby is hungry."
        |"Later, {hero}," said Dad. "The baby is asleep."]

        {hero} [felt very alone|was {sad}|was angry]. ["Nobody has time for me anymore," {he} thought.
        |"They only love the baby," {he} thought.|"Can we take it back?" {he} asked. Nobody laughed.]
        [{He} sat under the table with {his} toys and did not come out.|{He} packed {his} little bag. "I am going to
        live in the garden," {he} said.|{He} shouted very loud, and then the baby cried again.]

        Then Grandma came and sat down on the floor beside {him}. ["It is hard to be the big one," she said.
        |"When your mother was small," she said, "she wanted to give her little sister to the milkman."]
        "[Do they still love me?|Is there enough love for two?]" asked {hero}. ["Love is not like a cake," said Grandma.
        "It does not get smaller when you share it."|"A candle can light another candle," said Grandma, "and it does not
        get any darker."|"When you came, there was new love for you," said Grandma. "And now there is more."]

        [That afternoon, the baby began to cry again.|Then there was a loud cry from the next room.] Mom [sang
        |rocked the cradle], but the baby cried. Dad [carried the baby up and down
        |shook the rattle], but the baby cried. [{hero} came in on {his} toes.|"May I try?" asked {hero}.]
        {He} {help}. The baby [stopped crying|grew quiet] and looked at {him} with big [blue|brown|dark]
        eyes. And then the baby smiled! ["Did you see that?" cried {hero}.|"That was the very first smile," said Dad,
        "and it was for you."|"How did you do that?" asked Mom.]
        [|¶] {hero} was {proud}. {He} {bring}. [|In the evening, Mom read a story just for {him}.
        |And that night, Dad carried {him} to bed on his back, as he had always done.]
        ["I was small once, too," {he} told the baby. "I will show you everything."
        |"When you are bigger, we will play," {he} whispered. "I can wait."|{learned} there is enough love for
        everyone.]
        """,
    ),
)
